"""Muon's orthogonalisation against the singular value decomposition."""

import torch

from draftsmith.distill.muon import Muon, orthogonalised


def test_keeps_singular_vectors_and_flattens_singular_values():
    torch.manual_seed(0)
    for shape in ((3, 8, 24), (3, 24, 8)):
        matrices = torch.randn(shape)
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        result = orthogonalised(matrices, dtype=torch.float32)
        inner = left.mT @ result @ right.mT
        # Five rounds map singular values to about 0.7..1.2; the fast polynomial does not converge to 1.
        assert torch.all((inner.diagonal(dim1=-2, dim2=-1) - 1).abs() < 0.35)
        assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3


def test_fits_a_linear_map_and_skips_parameters_without_gradient():
    torch.manual_seed(0)
    goal, weight, idle = torch.randn(8, 8), torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.ones(8, 8))
    optimizer = Muon([weight, idle], lr=0.1)
    first = (weight - goal).square().mean().item()
    for _ in range(100):
        loss = (weight - goal).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1 * first
    assert torch.equal(idle, torch.ones(8, 8))


def test_columns_are_updated_as_if_inputs_were_divided_by_their_sizes():
    """Beside a plain weight of the same shape; the reference is the weight of the divided inputs."""
    torch.manual_seed(0)
    sizes, inputs, goal = torch.logspace(-1, 3, 6), torch.randn(32, 6), torch.randn(32, 4)
    start = torch.randn(4, 6)
    weight, plain, divided = (torch.nn.Parameter(start / by) for by in (sizes, 1.0, 1.0))
    optimizer = Muon([{"params": [plain]}, {"params": [weight], "columns": sizes}], lr=0.1)
    reference = Muon([divided], lr=0.1)
    for _ in range(5):
        for used, given in ((weight, inputs * sizes), (divided, inputs), (plain, inputs)):
            (given @ used.T - goal).square().mean().backward()
        for made in (optimizer, reference):
            made.step()
            made.zero_grad()
    torch.testing.assert_close(weight * sizes, divided, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain, divided)
