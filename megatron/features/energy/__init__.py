"""What a run spends: joules by the counters of its devices and processors, money, CO2.

``nvml`` and ``rapl`` read counters, ``meter`` adds up those of all ranks, ``totals`` makes money
and CO2 of them and keeps them over the starts of a run, ``callback`` is called by the training.
"""
