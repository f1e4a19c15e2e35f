"""Decoders, their tokenizers, and the formats they are loaded from."""

from models.config import ModelConfig
from models.decoder import Decoder
from models.formats.orbax import save_checkpoint
from models.grammar import GrammarCompiler
from models.load import LoadedModel, load_model
from models.tokenizer import Tokenizer

__all__ = ["Decoder", "GrammarCompiler", "LoadedModel", "ModelConfig", "Tokenizer", "load_model", "save_checkpoint"]
