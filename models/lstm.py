"""A bidirectional LSTM that classifies a sequence of feature vectors: a second of speech into one of 35 words.

Graves and Schmidhuber, "Framewise Phoneme Classification with Bidirectional LSTM", Neural Networks 18 (2005); the
classes are those of Warden, "Speech Commands" (2018).
"""

from torch import Tensor, nn

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import features

# torch.export cannot keep the length of an nn.LSTM's sequence dynamic (torch 2.13), hence a fixed number of frames.
FRAMES = 100
FEATURES = 80
HIDDEN = 256


class SequenceClassifier(nn.Module):
    """Two bidirectional layers, the mean over time, and a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * HIDDEN, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        states, _ = self.lstm(features)
        logits: Tensor = self.fc(states.mean(1))
        return logits


def lstm(*, num_classes: int = 35, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make the classifier in eval mode and two example sequences of 100 frames with 80 features.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    module = SequenceClassifier(num_classes)
    if weights is not None:
        load_weights(module, weights)
    return module.eval(), {"features": features(FRAMES, FEATURES)}
