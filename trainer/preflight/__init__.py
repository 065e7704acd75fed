"""How much memory a trainer needs, computed from the model's configuration before anything is loaded."""
