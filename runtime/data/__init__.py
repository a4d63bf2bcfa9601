"""Documents to tokens to sequences to global batches, each random access.

`open_data(spec)` is the entry point; docs/data.md explains the rest.

formats.py                       the texts in files, which core/inputs.py opens
documents.py                     documents of a source, or of a class of the user
tokenizers.py, tokenize.py       documents and chats as tokens, and which of them are trained on
chats.py, chat_template.py       chats as documents
store.py                         tokens with a table of documents, in memory, or memory-mapped from shards
packing.py                       tokens as sequences, each made by its index
batches.py                       sequences in an order, global batches, iterators
corpus.py, splits.py             all of it for a declared run or evaluation, every check, and from a batch back to its
                                 documents
write.py, show.py                `meshloom data`: a corpus of any size into shards, or one document shown
"""

from .batches import Batches, BatchIterator, HostBatch
from .documents import DataSource
from .splits import Data, describe_documents, open_data
from .store import Split

__all__ = [
    "BatchIterator", "Batches", "Data", "DataSource", "HostBatch", "Split", "describe_documents", "open_data",
]  # fmt: skip
