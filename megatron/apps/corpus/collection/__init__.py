"""Collection of a corpus: from dumps, URL lists and downloaded pages to JSON lines for training.

tools/README.md lists the commands in the order of use. A command consists of a few flags and a
function that processes one record (`json_files`). `line_job` applies this function to files in
several processes. Outputs appear only when they are complete, and a killed run can be resumed with
byte-identical results.

datatrove 0.10.1 was evaluated as a replacement and rejected. On 2,000 documents of OpenWebText,
half of them edited copies, its MinHash took 26 CPU seconds (ours: 2.7), found 61 % of the pairs
with a Jaccard similarity of 0.7 over characters (ours: 99.9 %) and reports no similarities. Its
other components are further behind: see the notes in `cleaning`, `decontamination` and `urls`. Its
readers and writers rewrite every line, and a killed task restarts at its first document.
"""
