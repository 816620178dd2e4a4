from drawn_episodes import WritingGPT

FAMILY = WritingGPT()
