from labelled_texts import LabelledBert

FAMILY = LabelledBert("regression", head="classification", num_labels=1)
