"""The procedure of BERT's run_squad.py, one word, token and span at a time."""


def slow_windows(question, tokenizer, seq_length, stride, query):
    """(tokens, types, span, whether each token of the text is seen best here) of each window."""
    words, starts = [], []
    for place, character in enumerate(question.context):
        if character.isspace():
            continue
        if place == 0 or question.context[place - 1].isspace():
            words.append("")
            starts.append(place)
        words[-1] += character
    tokens, word_of = [], []
    for number, word in enumerate(words):
        for token in tokenizer.tokenize(word):
            tokens.append(token)
            word_of.append(number)
    gold = None
    if question.answers:
        answer = question.answers[0]
        last = answer.start + len(answer.text) - 1
        first_word = max(n for n, start in enumerate(starts) if start <= answer.start)
        last_word = max(n for n, start in enumerate(starts) if start <= last)
        inside = [n for n, word in enumerate(word_of) if first_word <= word <= last_word]
        # Of the words around the answer, the tokens that spell it.
        wanted = tokenizer.tokenize(answer.text)
        gold = inside[0], inside[-1]
        for i in inside:
            if tokens[i : i + len(wanted)] == wanted:
                gold = i, i + len(wanted) - 1
                break
    asked = tokenizer.tokenize(question.question)[:query]
    room = seq_length - len(asked) - 3
    spans, begin = [], 0
    while True:
        length = min(len(tokens) - begin, room)
        spans.append((begin, length))
        if begin + length == len(tokens):
            break
        begin += stride
    found = []
    for place, (begin, length) in enumerate(spans):
        row = [tokenizer.cls, *asked, tokenizer.sep, *tokens[begin : begin + length], tokenizer.sep]
        types = [0] * (len(asked) + 2) + [1] * (length + 1)
        best = []
        for token in range(begin, begin + length):
            scores = [
                min(token - b, b + n - 1 - token) + 0.01 * n if b <= token < b + n else -1
                for b, n in spans
            ]
            best.append(scores.index(max(scores)) == place)
        span = (0, 0)
        if gold and begin <= gold[0] and gold[1] < begin + length:
            span = tuple(t - begin + len(asked) + 2 for t in gold)
        found.append((row, types, span, best))
    return found


def slow_prediction(windows, logits, search):
    spans, null, passage = [], None, windows[0].passage
    for window, row in zip(windows, logits, strict=True):
        order = [
            sorted(range(window.length), key=lambda i, side=side: -row[i][side])[
                : search.n_best_size
            ]
            for side in (0, 1)
        ]
        cls = float(row[0][0]), float(row[0][1])
        if null is None or sum(cls) < sum(null):
            null = cls
        for start in order[0]:
            for end in order[1]:
                text = range(window.text, window.length - 1)
                if start not in text or end not in text:
                    continue
                if not window.best_N[start - window.text] or end < start:
                    continue
                if end - start + 1 > search.max_answer_length:
                    continue
                first, last = (t - window.text + window.first for t in (start, end))
                words = passage.text[passage.offsets_T2[first][0] : passage.offsets_T2[last][1]]
                spans.append((words, float(row[start][0]), float(row[end][1])))
    if search.with_negative:
        spans.append(("", *null))
    spans.sort(key=lambda s: s[1] + s[2], reverse=True)
    best = []
    for span in spans:
        if len(best) < search.n_best_size and span[0] not in [b[0] for b in best]:
            best.append(span)
    if search.with_negative and "" not in [b[0] for b in best]:
        best.append(("", *null))
    answer = next((b for b in best if b[0]), ("", 0.0, 0.0))
    odds = sum(null) - sum(answer[1:])
    said = answer[0]
    if search.with_negative and odds > search.null_score_diff_threshold:
        said = ""
    return said, best, odds
