from drawn_preferences import PreferringGPT

FAMILY = PreferringGPT()
