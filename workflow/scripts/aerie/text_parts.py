r"""Texts cut into parts whose token ids, put together, are those of the whole: a part that recurs is encoded once.

A cut is made only where the tokens on either side provably do not depend on the other side: before an added token, and where
a line begins, if the pre-tokenizer is one of those known here. Any other text stays in one part.
"""

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Where a line may be cut off from what precedes it. No pattern below looks behind, so the words after a cut depend on nothing
# before it; it remains that no word crosses the cut, and that the words before it are the same where the text ends there.
# In the patterns of Qwen2 and Qwen3, Qwen3.5 and Llama 3, a line break is matched by [\r\n]* and \s*[\r\n]+ alone, in which
# nothing but white space follows it. Both are greedy and come before \s+(?!\S), so they match the same at the end of a text.
_ANY_BREAK = re.compile(r"(?<=\n)(?=\S)")
_PATTERNS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# In GPT-2's pattern (ByteLevel's own), by \s+(?!\S) and \s+, which divide white space before a letter otherwise than at the
# end of a text; but where it is a single line break, both take just that.
_LONE_BREAK = re.compile(r"(?<=\S\n)(?=\S)")


class Cutter:
    """Cuts texts for a fast tokenizer, to be encoded without truncation, padding and tokens around them."""

    def __init__(self, backend: "Tokenizer") -> None:
        added = backend.get_added_tokens_decoder().values()
        # Those that are not "normalized" are found in a text before all else, from the left, the longest first, and what lies
        # between them is encoded apart: unless one takes white space beside it along, or looks at what stands there.
        first = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
        aside = any(token.lstrip or token.rstrip or token.single_word for token in added)
        self.added = re.compile("|".join(map(re.escape, first)) if first and not aside else "(?!)")
        # The others are found later, within a part.
        across = any(token.normalized and "\n" in token.content for token in added)
        self.line = None if aside or across else _line_start(backend)

    def parts(self, text: str) -> list[str]:
        """The parts, in order: cut before each added token, and before the first line that begins after it.

        So the part that is a long text is the same whatever the turn opens with, such as an empty thought.
        """
        cuts = [0]
        after = 0
        for begin, end in [*(found.span() for found in self.added.finditer(text)), (len(text), len(text))]:
            if self.line and (found := self.line.search(text, after, begin)):
                cuts.append(found.start())
            cuts.append(begin)
            after = end
        return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]


def _line_start(backend: "Tokenizer") -> re.Pattern[str] | None:
    """Where a text may be cut at the beginning of a line; None: nowhere."""
    # Nothing composes with a line break, so NFC is the same on both sides of it.
    normalizer, pre_tokenizer = (json.loads(part.__getstate__()) if part else None for part in (backend.normalizer, backend.pre_tokenizer))
    if normalizer in (None, {"type": "NFC"}):
        match pre_tokenizer:
            case {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            } if pattern in _PATTERNS:
                return _ANY_BREAK
            case {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}],
            }:
                return _LONE_BREAK
    return None
