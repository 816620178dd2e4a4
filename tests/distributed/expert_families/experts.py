from experts_gpt import ExpertsGPT

FAMILY = ExpertsGPT()
