"""Sampled speculation in a few kernels, none of which writes a softmax to memory.

stats   rows x chunks       triton_stats.py   largest logit and sum of exponentials of a chunk
filter  rows                triton_filter.py  (top-k, top-p) which logits stay
left    drafts x chunks     triton_judge.py   (block verification) sums of max(w p - q, 0)
judge   requests            triton_judge.py   how many drafts are accepted
draw    requests x chunks   triton_draw.py    the winner of each chunk under p or max(p - q, 0)
finish  requests            triton_draw.py    the tokens
draft   requests x chunks   triton_draw.py    the drafts of the next step
"""

from .triton_draw import draw_drafts
from .triton_judge import accept_sampled

__all__ = ["accept_sampled", "draw_drafts"]
