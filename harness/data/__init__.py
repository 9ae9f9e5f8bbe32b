"""A recipe's data: files and conversations are read, tokenized and laid into rows. It needs no torch."""
# pyright: reportUnusedImport=false

from harness.data.check import check_data
from harness.data.lengths import example_lengths
from harness.data.pairs import pair_rows
from harness.data.rows import NOT_PREDICTED, DataSummary, Row, Rows, corpus_rows, pack, synthetic_rows
from harness.data.tokenizer import build_tokenizer
