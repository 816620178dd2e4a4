"""Collecting a corpus: from dumps, URL lists and downloaded pages to JSON lines for training.

tools/README.md lists the commands in the order in which they are used. Each is a few flags and a
function of one record (`json_files`), which `line_job` applies to files in several processes:
outputs appear when they are complete, and a killed run continues to the same bytes.

datatrove 0.10.1 was tried for all of it and not taken. On 2,000 documents of OpenWebText, half of
them edited copies, its MinHash took 26 CPU seconds (ours: 2.7), found 61 % of the pairs with a
Jaccard similarity of 0.7 over characters (ours: 99.9 %) and reports no similarities. Its other
parts lose more: see the notes in `cleaning`, `decontamination` and `urls`. Its readers and writers
rewrite every line, and a killed task starts again at its first document.
"""
