from labelled_texts import LABELS, LabelledBert

FAMILY = LabelledBert("classification", head="classification", num_labels=LABELS)
