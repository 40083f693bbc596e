"""Attention within packed documents on one rank, for unmodified Hugging Face models."""

from primerl.attention.admission import refuse_unpackable
from primerl.attention.documents import Document, Layout, Span, find_documents, lay_out
from primerl.attention.kernels import attend, choose_kernel
from primerl.attention.packed import require_documents
from primerl.attention.sparse import score_in_fp8
from primerl.attention.switching import attend_by_document

__all__ = [
    "Document",
    "Layout",
    "Span",
    "attend",
    "attend_by_document",
    "choose_kernel",
    "find_documents",
    "lay_out",
    "refuse_unpackable",
    "require_documents",
    "score_in_fp8",
]
