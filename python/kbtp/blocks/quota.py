"""Allocation quotas (draft 3.4): what each initiator may hold, and what it holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kbtp.errors import ApiMisuse


@dataclass(slots=True)
class _Account:
    quota: int
    usage: int = 0
    released: bool = False
    apart: bool = False


class QuotaLedger:
    """The quotas of all holders, whose sum is never larger than `total_blocks` (draft 3.4), but for those set apart.

    A holder's usage is the number of handles it has bound, of allocations it has begun, and of frees that have not
    completed. Holders are any hashable values, one for each grant. Misuse by the caller raises `ApiMisuse`.
    """

    def __init__(self, total_blocks: int) -> None:
        if total_blocks < 1:
            raise ApiMisuse(f"{total_blocks} blocks: at least 1 expected")
        self.total_blocks = total_blocks
        self._left = total_blocks
        self._accounts: dict[Hashable, _Account] = {}

    @property
    def left(self) -> int:
        """Blocks that are in nobody's quota."""
        return self._left

    def grant(self, holder: Hashable, requested: int) -> int:
        """Open an account: `requested` blocks, or what is left if that is less. Zero is an account too."""
        if requested < 0:
            raise ApiMisuse(f"quota {requested} requested: zero or more expected")
        if holder in self._accounts:
            raise ApiMisuse(f"{holder!r} has a quota already")
        granted = min(requested, self._left)
        self._left -= granted
        self._accounts[holder] = _Account(granted)
        return granted

    def set_apart(self, holder: Hashable, blocks: int) -> None:
        """From now on the quota of `holder` is `blocks` that are in no other's: those of its own partition.

        It may have an account, but must use nothing of it: what it had of the others' is theirs again.
        """
        account = self._accounts.get(holder)
        if account is not None:
            if account.usage or account.released or account.apart:
                raise ApiMisuse(f"{holder!r} has a quota that is in use, released or set apart")
            self._left += account.quota
        self._accounts[holder] = _Account(blocks, apart=True)

    def release(self, holder: Hashable) -> None:
        """Close the account. What is still used stays out of other quotas until it is credited, unit by unit."""
        account = self._account(holder)
        if account.released:
            raise ApiMisuse(f"{holder!r} has been released already")
        account.released = True
        if not account.apart:
            self._left += account.quota - account.usage
        account.quota = account.usage
        self._drop_if_settled(holder, account)

    def charge(self, holder: Hashable) -> bool:
        """One unit of usage, before a ticket is taken (profile 6.8). False, and no change: the quota is reached."""
        account = self._account(holder)
        if account.usage >= account.quota:
            return False
        account.usage += 1
        return True

    def credit(self, holder: Hashable) -> None:
        """Give one unit back: a FREE completes, or an allocation came to nothing."""
        account = self._account(holder)
        if account.usage == 0:
            raise ApiMisuse(f"{holder!r} is credited more often than charged")
        account.usage -= 1
        if account.released:
            account.quota -= 1
            self._left += not account.apart
            self._drop_if_settled(holder, account)

    def usage(self, holder: Hashable) -> int:
        """Units in use; zero for a holder without an account."""
        account = self._accounts.get(holder)
        return account.usage if account else 0

    def quota(self, holder: Hashable) -> int:
        """Units granted (once released: those still used); zero for a holder without an account."""
        account = self._accounts.get(holder)
        return account.quota if account else 0

    def _account(self, holder: Hashable) -> _Account:
        account = self._accounts.get(holder)
        if account is None:
            raise ApiMisuse(f"{holder!r} has no quota")
        return account

    def _drop_if_settled(self, holder: Hashable, account: _Account) -> None:
        if account.usage == 0:
            del self._accounts[holder]
