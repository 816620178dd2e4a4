from labelled_texts import LabelledBert

FAMILY = LabelledBert("span", head="span")
