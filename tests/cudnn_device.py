"""What depends on the device in openconv.cudnn: memory by address, plans by number, streams and CUDA graphs. Functions
take the module, a device and a dtype, as those of tests/tutorial_cudnn.py do; tests/gpu runs them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tutorial_cudnn import close, draw, draw_filter


def _built(cudnn: Any, device: Any, dtype: torch.dtype) -> tuple[Any, list[Any], list[Tensor], Callable[[], Tensor]]:
    """relu(conv(x, w) * alpha + bias) as a pygraph that is built: the graph, its tensors (alpha last), their buffers,
    and what the result should be of what is in them. alpha is passed by value."""
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=cudnn.data_type.FLOAT, handle=handle)
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    bias = draw(1, 32, 1, 1, device=device, dtype=dtype)
    out = torch.full((2, 32, 14, 14), torch.nan, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    given = [graph.tensor_like(each) for each in (x, w, bias)]
    alpha = graph.tensor([1, 1, 1, 1], is_pass_by_value=True, data_type=cudnn.data_type.FLOAT)
    hidden = graph.mul(graph.conv_fprop(*given[:2], padding=[1, 1]), alpha)
    y = graph.relu(graph.add(hidden, given[2])).set_output(True)
    graph.build([cudnn.heur_mode.A])

    def expected() -> Tensor:
        wide = F.conv2d(x.float(), w.float(), padding=1) * 0.5 + bias.float()
        return F.relu(wide).to(dtype)

    return graph, [*given, y, alpha], [x, w, bias, out], expected


def addresses(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """Buffers, and the workspace, as nothing but addresses."""
    graph, tensors, buffers, expected = _built(cudnn, device, dtype)
    room = torch.empty(graph.get_workspace_size() + 16, dtype=torch.uint8, device=device)
    pack = {one.get_uid(): buffer.data_ptr() for one, buffer in zip(tensors, buffers, strict=False)}
    graph.execute({**pack, tensors[-1].get_uid(): 0.5}, room.data_ptr() + -room.data_ptr() % 16)
    close(buffers[3], expected())


def every_plan(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """Each of the first plans, and the last one, with the workspace that it says it needs."""
    graph, tensors, buffers, expected = _built(cudnn, device, dtype)
    pack = dict(zip(tensors, (*buffers, 0.5), strict=True))
    count = graph.get_execution_plan_count()
    for index in sorted({*range(min(count, 6)), count - 1}):
        buffers[3].fill_(torch.nan)
        room = torch.empty(graph.get_workspace_size_plan_at_index(index), dtype=torch.uint8, device=device)
        graph.execute_plan_at_index(pack, room, index)
        close(buffers[3], expected())


def restored(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """A graph from its bytes."""
    graph, tensors, buffers, expected = _built(cudnn, device, dtype)
    again = cudnn.pygraph()
    again.deserialize(cudnn.create_handle(), graph.serialize())
    again.execute({one.get_uid(): each for one, each in zip(tensors, (*buffers, 0.5), strict=True)})
    close(buffers[3], expected())


def streams(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """Work goes to the handle's stream: it waits for what lies there before it."""
    graph, tensors, buffers, expected = _built(cudnn, device, dtype)
    pack = dict(zip(tensors, (*buffers, 0.5), strict=True))
    graph.execute(pack)  # compiled now
    torch.cuda.synchronize()
    stream, source = torch.cuda.Stream(), torch.randn_like(buffers[0])
    torch.cuda.synchronize()
    for given in (stream, stream.cuda_stream):
        handle = cudnn.create_handle()
        cudnn.set_stream(handle, given)
        assert cudnn.get_stream(handle) == stream.cuda_stream
        buffers[0].zero_()
        buffers[3].fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            buffers[0].copy_(source)
        graph.execute(pack, handle=handle)
        stream.synchronize()
        close(buffers[3], expected())


def cuda_graphs(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """A CUDA graph of the caller's is filled, launched, updated to other buffers and launched again."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) == 2 else None

    def launch(recorded: Any) -> None:
        made = checked(driver.cuGraphInstantiate(recorded, 0))
        stream = torch.cuda.current_stream()
        checked(driver.cuGraphLaunch(made, driver.CUstream(stream.cuda_stream)))
        stream.synchronize()
        checked(driver.cuGraphExecDestroy(made))

    graph, tensors, buffers, expected = _built(cudnn, device, dtype)
    handle = cudnn.create_handle()
    room = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
    recorded = checked(driver.cuGraphCreate(0))
    pack = dict(zip(tensors, (*buffers, 0.5), strict=True))
    graph.populate_cuda_graph(handle, pack, room, int(recorded))
    torch.cuda.synchronize()
    assert bool(buffers[3].isnan().all()), "recording computed"
    launch(recorded)
    close(buffers[3], expected())
    buffers[0].copy_(torch.randn_like(buffers[0]))  # the same memory, other values
    launch(recorded)
    close(buffers[3], expected())
    other = torch.full_like(buffers[3], torch.nan)
    graph.update_cuda_graph(handle, {**pack, tensors[3]: other}, room, int(recorded))
    buffers[3].fill_(torch.nan)
    torch.cuda.synchronize()
    launch(recorded)
    close(other, expected())
    assert bool(buffers[3].isnan().all())
    checked(driver.cuGraphDestroy(recorded))


ANYWHERE: dict[str, Callable[[Any, Any, torch.dtype], None]] = {
    case.__name__: case for case in (addresses, every_plan, restored)
}  # fmt: skip
ON_CUDA: dict[str, Callable[[Any, Any, torch.dtype], None]] = {
    case.__name__: case for case in (streams, cuda_graphs)
}  # fmt: skip
"""Those that a CUDA device is needed for."""
