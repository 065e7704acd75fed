"""Which tensors a model computes with were made from its weights, and whether they are what they were."""

import torch

from tba.searcher.engines.vllm.weight_state import ProcessingWatch, clear, differences, fingerprint, zeros


class Layer(torch.nn.Module):
    """Keeps a transposed copy of its weight in a closure after `process`, and a constant that is no copy."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 7).view(2, 3), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))

    def process(self):
        copy = (self.weight * 1.0).T.contiguous()
        constant = torch.full((4,), 2.0)
        self.multiply = lambda: (copy, constant)


def processed():
    layer = Layer()
    with ProcessingWatch(layer) as watch:
        layer.process()
    return layer, watch.derived(layer)


def test_a_tensor_made_from_a_weight_and_kept_is_found_and_a_constant_is_not():
    layer, derived = processed()
    assert [one.name for one in derived] == ["weight"]
    clear(derived)
    copy, constant = layer.multiply()
    assert not copy.any()
    assert constant.tolist() == [2.0] * 4


def test_temporary_tensors_are_not_kept():
    layer = Layer()
    with ProcessingWatch(layer) as watch:
        assert (layer.weight + 1).sum() == 27
    assert watch.derived(layer) == []


def test_a_copy_into_an_existing_tensor_makes_it_derived():
    layer = Layer()
    layer.workspace = torch.zeros(3, 2)
    with ProcessingWatch(layer) as watch:
        layer.workspace.copy_(layer.weight.T)
    assert [one.name for one in watch.derived(layer)] == ["weight"]


def test_each_changed_or_moved_tensor_is_named():
    layer, derived = processed()
    before = fingerprint(layer, derived)
    assert before.keys() == {"weight", "bias", "scale", "tensor 0, made from weight"}
    clear(derived)
    layer.scale += 1
    layer.bias.data = layer.bias.data.clone()
    assert differences(before, fingerprint(layer, derived)) == ["bias", "scale", "tensor 0, made from weight"]


def test_a_derived_tensor_on_the_host_may_be_replaced_by_another():
    layer, derived = processed()
    before = fingerprint(layer, derived)
    layer.process()
    assert differences(before, fingerprint(layer, derived)) == []


def test_parameters_that_are_all_zero_are_named():
    assert zeros(Layer()) == {"bias"}
