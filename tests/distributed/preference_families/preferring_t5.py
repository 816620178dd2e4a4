from drawn_preferences import PreferringT5

FAMILY = PreferringT5()
