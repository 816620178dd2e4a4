from labelled_texts import LabelledBert

FAMILY = LabelledBert("multiple_choice", head="multiple_choice")
