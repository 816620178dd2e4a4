"""Detoxifying a model by texts of its own (Wang et al. 2022, arXiv:2202.04173): samples are scored,
and the model is trained on the least toxic half of them."""
