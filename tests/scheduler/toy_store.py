"""A store of blocks, and transfers that begin and end when the test says so."""

from dflash_trt.core.request import Request
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.stored_prefixes import Block, Transfer
from tests.fake_executor import Content, FakeExecutor


class ToyStore:
    """Of one engine after another, which `attach` names."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, bool], tuple[Block, Content]] = {}
        self.saving: list[tuple[Transfer, Content]] = []
        self.loading: list[tuple[Request, list[Transfer]]] = []

    def attach(self, scheduler: Scheduler, executor: FakeExecutor, *, publishes_all: bool = False) -> None:
        """Of what was on its way for another engine nothing comes any more."""
        self.saving, self.loading = [], []
        self.num_saved = self.num_loaded = 0
        self._scheduler, self._host = scheduler, executor.host
        self.prefixes = scheduler.stored_prefixes(b"toy", publishes_all=publishes_all)

    def begin_saving(self) -> None:
        for node, block in self.prefixes.arrivals(1000):
            transfer = self.prefixes.begin_saving(node, block)
            self.saving.append((transfer, self._content(transfer)))

    def end_saving(self, index: int, *, is_saved: bool = True) -> None:
        transfer, content = self.saving.pop(index)
        assert self._content(transfer) == content, "a place changed while it was read"
        if is_saved:
            self.blocks[transfer.block.name] = (transfer.block, content)
            self.num_saved += 1
        self.prefixes.end_saving(transfer, is_saved=is_saved)

    def begin_loading(self, request: Request) -> None:
        """The request waits until `end_loading`."""
        tokens, salt = request.prompt_token_ids, request.cache_salt
        start = self.prefixes.num_known(tokens, salt=salt)
        found = [
            [self.blocks[key, kind][0] for kind in (False, True) if (key, kind) in self.blocks]
            for key in self.prefixes.keys(tokens, salt=salt)[start:]
        ]
        transfers = self.prefixes.begin_loading(tokens, found, start=start, salt=salt)
        for transfer in transfers:  # as a file that is read bit by bit
            is_state = transfer.block.is_state
            self._host.write(transfer.place, {(-1, 0): {}} if is_state else {(0, 0): [-7]}, is_state=is_state)
        self._scheduler.set_aside(request.request_id)
        self.loading.append((request, transfers))

    def end_loading(self, index: int, num_come: int) -> None:
        """The first `num_come` blocks have come."""
        request, transfers = self.loading.pop(index)
        for transfer in transfers[:num_come]:
            content = self.blocks[transfer.block.name][1]
            self._host.write(transfer.place, content, is_state=transfer.block.is_state)
        tokens, salt = request.prompt_token_ids, request.cache_salt
        keys, match = self.prefixes.keys(tokens, salt=salt), self._scheduler._request_pool.store.match
        num_known = len(match(tokens, salt=salt))
        self.prefixes.end_loading(tokens, keys, transfers, salt=salt, has_come=transfers[:num_come].__contains__)
        num_cached = len(match(tokens, salt=salt))
        come = [transfer.block for transfer in transfers[:num_come]]
        self.num_loaded += num_cached - num_known
        self.num_loaded += sum(block.is_state and block.key in keys[:num_cached] for block in come)
        self._scheduler.take_up(request.request_id)

    def _content(self, transfer: Transfer) -> Content:
        block = transfer.block
        return self._host.content(transfer.place, is_state=block.is_state, groups=block.groups)
