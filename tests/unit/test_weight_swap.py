"""What a packed copy of a weight has to give is computed a part of the weight at a time."""

import pytest
import torch

from tba.searcher import weight_swap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 10, 21])
def test_the_product_that_proves_a_packed_copy_is_that_of_the_whole_weight(rows, dtype):
    weight = torch.randn(rows, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    product = weight_swap._product("layer", weight, torch.empty(10 * 24))
    exact = product.probe.double() @ weight.double().T
    assert product.expected.dtype == torch.float32
    torch.testing.assert_close(product.expected.double(), exact, rtol=1e-5, atol=1e-5)
