"""Documents to tokens to sequences to global batches, each random access.

`open_data(spec)` is the entry point; docs/data.md explains the rest.

files.py, formats.py                     files on disk and behind URLs, and the texts in them
documents.py, user_code.py               documents of a source, or of a class of the user
tokenizers.py, tokenize.py                documents as tokens
chats.py, chat_template.py, chat_tokens.py    chats as documents, and which of their tokens are trained on
store.py, shards.py                       tokens with a table of documents, in memory or memory-mapped
download.py                               shards behind a URL, copied into a cache
packing.py, user_sequences.py             tokens as sequences, each made by its index
batches.py                                sequences in an order, global batches, iterators
locate.py                                 from a batch back to its documents
corpus.py, splits.py                      all of it for a declared run or evaluation, and every check
write.py, show.py                         `meshloom data`: a corpus of any size into shards, or one document shown
"""

from .batches import Batches, BatchIterator, HostBatch
from .locate import describe_documents
from .splits import Data, open_data
from .store import Split
from .user_code import DataSource

__all__ = ["BatchIterator", "Batches", "Data", "DataSource", "HostBatch", "Split", "describe_documents", "open_data"]
