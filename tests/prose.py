"""Measure how far the English of this project is from the English of its field.

    python tests/prose.py               # a table: this tree next to torch.distributed and accelerate
    python tests/prose.py --worst 30    # the files that would gain most from a rewrite
    python tests/prose.py --check       # exit status 1 if a limit is exceeded

The script measures three corpora: docstrings and comments of the packages, strings that people see (messages, help
texts), and Markdown. A marker is a turn of phrase that is rare in well-known projects of the field, and a limit is its
density per 10,000 words. The counts are a smoke detector: replacing one odd word with another does not make a sentence
idiomatic. Rewrite the sentence instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import sysconfig
import tokenize
from collections import Counter
from pathlib import Path

# marker: (pattern, limit per 10,000 words). torch.distributed, torchtitan, trio and accelerate stay below all limits.
MARKERS = {
    "what (as a pronoun)": (r"\bwhat\b", 15.0),
    "those": (r"\bthose\b", 8.0),
    "that of, those of": (r"\b(?:that|those) of\b", 1.0),
    "behind": (r"\bbehind\b", 1.5),
    "somebody, nobody, whoever": (r"\b(?:some|no|any)body\b|\bwhoever\b", 1.0),
    "go on": (r"\b(?:go(?:es)?|went|gone|going) on\b", 1.0),
    "lie": (r"\bl(?:ie|ies|ay|ain)\b", 0.7),
    "beside": (r"\bbeside\b", 0.7),
    "anew": (r"\banew\b", 0.3),
    "is said, is told": (r"\b(?:is|are|was|were|be) (?:said|told)\b", 0.7),
    "nothing, none": (r"\b(?:nothing|none)\b", 45.0),
    "but for, other than that": (r"\bbut for\b", 0.3),
    "has to do, is to do": (r"\b(?:is|are) to (?:be )?\w+\b", 6.0),
}
OPENERS = re.compile(r"^(?:what|who|whose|which|whether|where|how)\b", re.I)
OPENER_LIMIT = 2.0  # percent of docstrings that begin with one of these words
PACKAGES = ("infinity", "daemon", "tools")


def docstrings_and_comments(source: str) -> tuple[list[str], list[str]]:
    """Return the docstrings (attribute docstrings too) and the comments of a module."""
    tree = ast.parse(source)
    docs = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    return docs, comments


def visible_strings(source: str) -> list[str]:
    """Return string literals of four words or more that are no docstrings: messages and help texts."""
    tree = ast.parse(source)
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    return [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs and len(n.value.split()) > 3
    ]


def markdown(text: str) -> str:
    """Return Markdown without code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.S))


def count(texts: list[str]) -> tuple[int, Counter[str]]:
    """Return the number of words, and of each marker."""
    found: Counter[str] = Counter()
    for text in texts:
        for name, (pattern, _) in MARKERS.items():
            found[name] += len(re.findall(pattern, text, re.I))
    return sum(len(text.split()) for text in texts), found


def modules(root: Path) -> list[Path]:
    """Return the Python files below a folder, except tests."""
    return [f for f in sorted(root.rglob("*.py")) if "tests" not in f.relative_to(root).parts]


def corpus(roots: list[Path]) -> tuple[list[str], list[str], list[str]]:
    """Return docstrings, comments and visible strings of packages."""
    docs: list[str] = []
    comments: list[str] = []
    strings: list[str] = []
    for root in roots:
        for file in modules(root):
            try:
                source = file.read_text(errors="replace")
                d, c = docstrings_and_comments(source)
                s = visible_strings(source)
            except (SyntaxError, tokenize.TokenError):
                continue
            docs, comments, strings = docs + d, comments + c, strings + s
    return docs, comments, strings


def per_ten_thousand(words: int, found: Counter[str]) -> dict[str, float]:
    """Return densities per 10,000 words."""
    return {name: 1e4 * found[name] / max(words, 1) for name in MARKERS}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout")
    parser.add_argument("--check", action="store_true", help="exit status 1 while a limit is exceeded")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N files with most markers")
    options = parser.parse_args()
    root = options.root
    own = corpus([root / name for name in PACKAGES])
    pages = [markdown(f.read_text()) for f in [*sorted((root / "docs").rglob("*.md")), *root.glob("*.md")]]
    columns = {"docstrings, comments": own[0] + own[1], "messages, help": own[2], "Markdown": pages}
    site = Path(sysconfig.get_path("purelib"))
    for venv in (root / ".venv").glob("lib/python3*/site-packages"):
        site = venv
    for name in ("torch/distributed", "accelerate"):
        if (site / name).is_dir():
            docs, comments, _ = corpus([site / name])
            columns[name] = docs + comments
    rows = {name: per_ten_thousand(*count(texts)) for name, texts in columns.items()}
    print(f"{'per 10,000 words':28s} {'limit':>7s} " + " ".join(f"{name:>21s}" for name in columns))
    failed = []
    for marker, (_, limit) in MARKERS.items():
        print(f"{marker:28s} {limit:7.1f} " + " ".join(f"{rows[name][marker]:21.1f}" for name in columns))
        failed += [
            f"{name}: {marker} {rows[name][marker]:.1f} > {limit}"
            for name in ("docstrings, comments", "messages, help", "Markdown")
            if rows[name][marker] > limit
        ]
    share = 100 * sum(bool(OPENERS.match(d.strip())) for d in own[0]) / max(len(own[0]), 1)
    print(f"docstrings that begin with what, who, which, whether, where, how: {share:.1f} % (limit {OPENER_LIMIT} %)")
    if share > OPENER_LIMIT:
        failed.append(f"openers {share:.1f} % > {OPENER_LIMIT} %")
    if options.worst:
        listed = []
        for name in PACKAGES:
            for file in modules(root / name):
                docs, comments = docstrings_and_comments(file.read_text())
                strings = visible_strings(file.read_text())
                words, found = count([*docs, *comments, *strings])
                listed.append((sum(found.values()), words, file))
        for page in [*sorted((root / "docs").rglob("*.md")), *root.glob("*.md")]:
            words, found = count([markdown(page.read_text())])
            listed.append((sum(found.values()), words, page))
        for total, words, file in sorted(listed, reverse=True)[: options.worst]:
            print(f"{total:5d} markers in {words:6d} words  {file.relative_to(root)}")
    if options.check and failed:
        print("over the limit: " + "; ".join(failed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
