"""How well a drafter's proposals are accepted, where, and which draft length pays.

from trtspec.report import measure_acceptance
report = measure_acceptance(llm)
report.overall[0].acceptance.acceptance_length.value
"""

from .advice import Advice, AdviceRow, advise
from .collect import Sample, collect_samples
from .measure import AcceptanceReport, measure_acceptance
from .statistics import Acceptance, Estimate, Group, acceptance_of, bucket_of
from .step_times import measure_step_ms

__all__ = [
    "Acceptance",
    "AcceptanceReport",
    "Advice",
    "AdviceRow",
    "Estimate",
    "Group",
    "Sample",
    "acceptance_of",
    "advise",
    "bucket_of",
    "collect_samples",
    "measure_acceptance",
    "measure_step_ms",
]
