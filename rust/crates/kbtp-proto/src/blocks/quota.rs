//! Allocation quotas (draft 3.4): what each initiator may hold, and what it holds.

use crate::own_maps::OwnMap;
use crate::types::ApiMisuse;

/// Names a holder, one for each grant; what the number stands for is the caller's.
pub type HolderId = u64;

#[derive(Clone, Copy, Debug)]
struct Account {
    quota: u32,
    usage: u32,
    released: bool,
    apart: bool,
}

impl Account {
    fn is_reached(&self, unbound_tickets: u32) -> bool {
        self.usage.saturating_add(unbound_tickets) >= self.quota
    }
}

/// The quotas of all holders, whose sum is never larger than `total_blocks` (draft 3.4), but for those set apart.
///
/// A holder's usage is the number of handles it has bound, of allocations it has begun, and of frees that have not
/// completed. Misuse by the caller is an error.
#[derive(Clone, Debug)]
pub struct QuotaLedger {
    left: u32,
    accounts: OwnMap<HolderId, Account>,
}

#[allow(missing_docs, clippy::missing_errors_doc, reason = "those of kbtp.blocks.quota")]
impl QuotaLedger {
    pub fn new(total_blocks: u32) -> Result<Self, ApiMisuse> {
        if total_blocks == 0 {
            return Err(ApiMisuse("0 blocks: at least 1 expected".into()));
        }
        Ok(Self {
            left: total_blocks,
            accounts: OwnMap::default(),
        })
    }

    /// Blocks that are in nobody's quota.
    #[must_use]
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Open an account: `requested` blocks, or what is left if that is less. Zero is an account too.
    pub fn grant(&mut self, holder: HolderId, requested: u32) -> Result<u32, ApiMisuse> {
        if self.accounts.contains_key(&holder) {
            return Err(ApiMisuse(format!("holder {holder} has a quota already")));
        }
        let quota = requested.min(self.left);
        self.left -= quota;
        self.accounts.insert(
            holder,
            Account {
                quota,
                usage: 0,
                released: false,
                apart: false,
            },
        );
        Ok(quota)
    }

    /// From now on the quota of `holder` is `blocks` that are in no other's: those of its own partition.
    ///
    /// It may have an account, but must use nothing of it: what it had of the others' is theirs again.
    pub fn set_apart(&mut self, holder: HolderId, blocks: u32) -> Result<(), ApiMisuse> {
        self.check_unused(holder)?;
        self.left += self.quota(holder);
        self.accounts.insert(
            holder,
            Account {
                quota: blocks,
                usage: 0,
                released: false,
                apart: true,
            },
        );
        Ok(())
    }

    /// Refuses a holder that `set_apart` would.
    pub(super) fn check_unused(&self, holder: HolderId) -> Result<(), ApiMisuse> {
        let used = |account: &Account| account.usage > 0 || account.released || account.apart;
        if self.accounts.get(&holder).is_some_and(used) {
            return Err(ApiMisuse(format!(
                "holder {holder} has a quota that is in use, released or set apart"
            )));
        }
        Ok(())
    }

    /// Close the account. What is still used stays out of other quotas until it is credited, unit by unit.
    pub fn release(&mut self, holder: HolderId) -> Result<(), ApiMisuse> {
        let account = self.account(holder)?;
        if account.released {
            return Err(ApiMisuse(format!("holder {holder} has been released already")));
        }
        account.released = true;
        let unused = account.quota - account.usage;
        account.quota = account.usage;
        if !account.apart {
            self.left += unused;
        }
        self.drop_if_settled(holder);
        Ok(())
    }

    /// One unit of usage, before a ticket is taken (profile 6.8). False, and no change: the quota is reached.
    ///
    /// `unbound_tickets` that the holder has taken by itself are usage too (draft 3.4).
    pub fn charge(&mut self, holder: HolderId, unbound_tickets: u32) -> Result<bool, ApiMisuse> {
        let account = self.account(holder)?;
        if account.is_reached(unbound_tickets) {
            return Ok(false);
        }
        account.usage += 1;
        Ok(true)
    }

    /// Whether `charge` would refuse; a holder without an account has nothing.
    #[must_use]
    pub fn is_reached(&self, holder: HolderId, unbound_tickets: u32) -> bool {
        let account = self.accounts.get(&holder);
        account.is_none_or(|account| account.is_reached(unbound_tickets))
    }

    /// Give one unit back: a FREE completes, or an allocation came to nothing.
    pub fn credit(&mut self, holder: HolderId) -> Result<(), ApiMisuse> {
        let account = self.account(holder)?;
        if account.usage == 0 {
            return Err(ApiMisuse(format!(
                "holder {holder} is credited more often than charged"
            )));
        }
        account.usage -= 1;
        if account.released {
            account.quota -= 1;
            let of_others = u32::from(!account.apart);
            self.left += of_others;
            self.drop_if_settled(holder);
        }
        Ok(())
    }

    /// Units in use; zero for a holder without an account.
    #[must_use]
    pub fn usage(&self, holder: HolderId) -> u32 {
        self.accounts.get(&holder).map_or(0, |account| account.usage)
    }

    /// Units granted (once released: those still used); zero for a holder without an account.
    #[must_use]
    pub fn quota(&self, holder: HolderId) -> u32 {
        self.accounts.get(&holder).map_or(0, |account| account.quota)
    }

    fn account(&mut self, holder: HolderId) -> Result<&mut Account, ApiMisuse> {
        self.accounts
            .get_mut(&holder)
            .ok_or_else(|| ApiMisuse(format!("holder {holder} has no quota")))
    }

    fn drop_if_settled(&mut self, holder: HolderId) {
        if self.usage(holder) == 0 {
            self.accounts.remove(&holder);
        }
    }
}
