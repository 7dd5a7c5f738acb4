"""
Kernel ridge regression from vectors of texts to their classes, with scores of each text as if it had been left out.

Legend: R texts, L layers, d hidden size, F = L·d features, N classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

TEXTS = 6000  # number of texts used at most. Time grows with its cube (ten seconds), memory with its square


class KernelRidge:
    """
    Kernel ridge regression from the vectors of texts to their class, with a Gaussian kernel: far from all texts, scores
    are 0. Classes have the same weight, however many texts they have. Layers have the same weight, too. The kernel's
    width is the root mean square distance of two texts.

    Args:
        classes: the vectors of each class's texts, [R, L, d]. If there are more than `TEXTS`, the largest classes are
            thinned out evenly.
        penalty: λ.
        digests: numbers of the texts of each class, int64 [R]. A text that several classes share counts for each of
            them: its target is 1 in each. None: all texts differ.

    Attributes:
        class_R: class of each text.
    """

    def __init__(
        self, classes: Sequence[torch.Tensor], penalty: float, digests: Sequence[torch.Tensor] | None = None
    ) -> None:
        steps = thinning([len(x_RLD) for x_RLD in classes])
        classes = [x_RLD[::step].float() for x_RLD, step in zip(classes, steps, strict=True)]
        x_RLD = torch.cat(classes)
        self.mean_LD = x_RLD.mean(0)
        variance_L = x_RLD.var(0, correction=0).sum(-1)
        self.scale_L1 = (2 * len(variance_L) * variance_L).sqrt().clamp_min(1e-12)[:, None]
        self.x_RF = self._scaled(x_RLD)
        self.square_R = self.x_RF.square().sum(1)
        count_N = torch.tensor([len(of_class) for of_class in classes])
        self.class_R = torch.arange(len(classes)).repeat_interleave(count_N)
        self.target_RN = torch.eye(len(classes), dtype=torch.float64)[self.class_R]
        if digests is None:
            self.text_R = torch.arange(len(x_RLD))
        else:
            used = [digest_R[::step] for digest_R, step in zip(digests, steps, strict=True)]
            _, self.text_R = torch.cat(used).unique(return_inverse=True)
            self.target_RN = _shared(self.text_R, self.target_RN)
        kernel_RR = self._kernel(self.x_RF)
        kernel_RR.diagonal().add_(penalty * count_N[self.class_R].double() * len(classes) / len(x_RLD))
        self._cholesky_RR = torch.linalg.cholesky(kernel_RR)
        self.coefficients_RN = torch.cholesky_solve(self.target_RN, self._cholesky_RR)

    def __call__(self, x_RLD: torch.Tensor) -> torch.Tensor:
        """Return scores of vectors [R, L, d] for each class, float64 [R, N]."""
        return self._kernel(self._scaled(x_RLD.float())) @ self.coefficients_RN

    @cached_property
    def left_out_RN(self) -> torch.Tensor:
        """Scores of each text by the regression on all other texts, none of its copies among them, in closed form."""
        inverse_RR = torch.cholesky_inverse(self._cholesky_RR)
        del self._cholesky_RR  # 300 MB for 6,000 texts, and not needed again
        error_RN = self.coefficients_RN / inverse_RR.diagonal()[:, None]
        copies = self.text_R.argsort(stable=True).split(self.text_R.bincount().tolist())
        for row_S in (row_S for row_S in copies if len(row_S) > 1):
            error_RN[row_S] = torch.linalg.solve(inverse_RR[row_S][:, row_S], self.coefficients_RN[row_S])
        return self.target_RN - error_RN

    def _scaled(self, x_RLD: torch.Tensor) -> torch.Tensor:
        """Center and scale vectors, so squared distances of the texts have mean 1, [R, L·d]."""
        return ((x_RLD - self.mean_LD) / self.scale_L1).flatten(1)

    def _kernel(self, x_RF: torch.Tensor) -> torch.Tensor:
        """Return exp(−d²/2) for the distances d from vectors to the texts' vectors, float64."""
        product = torch.addmm(self.square_R, x_RF, self.x_RF.T, alpha=-2)  # cdist would copy the texts' vectors
        return product.add_(x_RF.square().sum(1, keepdim=True)).clamp_min_(0).double().mul_(-0.5).exp_()


def thinning(counts: Sequence[int]) -> list[int]:
    """
    Return for each class k, to use every k-th of its texts. The bound on a class's texts is the same for all classes,
    and as high as `TEXTS` allows: small classes keep all of theirs.
    """
    left, most = TEXTS, 0
    for i, count in enumerate(sorted(counts)):
        most = max(1, left // (len(counts) - i))
        left -= min(count, most)
    return [-(-count // most) for count in counts]


def _shared(text_R: torch.Tensor, target_RN: torch.Tensor) -> torch.Tensor:
    """Return targets that are 1 for each class with the same text, [R, N]."""
    of_text_TN = torch.zeros(int(text_R.max()) + 1, target_RN.shape[1], dtype=target_RN.dtype)
    of_text_TN.index_add_(0, text_R, target_RN)
    return of_text_TN[text_R].clamp(max=1)
