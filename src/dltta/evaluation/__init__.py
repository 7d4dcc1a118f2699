"""8 metrics and runs over a stream, 9 results, tables, figures and the report."""

from dltta.evaluation.comparison import PairedTest, case_gains, negative_transfer, paired_test, worst_site
from dltta.evaluation.examples import Example, Keep, gather_examples
from dltta.evaluation.formats import csv_text, latex, markdown, rich_table
from dltta.evaluation.headline import sentences
from dltta.evaluation.provenance import Provenance, checksum
from dltta.evaluation.report import render_report, write_report
from dltta.evaluation.results import Results, Stream, SummaryRow
from dltta.evaluation.run import CaseRecord, Steps, StreamRecord, run_stream
from dltta.evaluation.tables import Table, by_metric, by_target, method_label
from dltta.metrics import (
    CLASSIFICATION_METRICS,
    SEGMENTATION_METRICS,
    SegmentationScores,
    higher_is_better,
    score_classification,
    score_segmentation,
)

__all__ = [
    "CLASSIFICATION_METRICS",
    "SEGMENTATION_METRICS",
    "CaseRecord",
    "Example",
    "Keep",
    "PairedTest",
    "Provenance",
    "Results",
    "SegmentationScores",
    "Steps",
    "Stream",
    "StreamRecord",
    "SummaryRow",
    "Table",
    "by_metric",
    "by_target",
    "case_gains",
    "checksum",
    "csv_text",
    "gather_examples",
    "higher_is_better",
    "latex",
    "markdown",
    "method_label",
    "negative_transfer",
    "paired_test",
    "render_report",
    "rich_table",
    "run_stream",
    "score_classification",
    "score_segmentation",
    "sentences",
    "worst_site",
    "write_report",
]
