//! Limits on the process's resources (address space, mappings, descriptors) for front-ends, overall and per
//! disk.
//!
//! `Budget (the process) → Quota (a disk, over all its sessions) → Charge (one mapping, one descriptor),
//! released when dropped`
//!
//! - Half of a budget is divided evenly into reserves, one per disk, which other disks cannot use. The other half is
//!   shared on a first-come basis. One disk can thus use little more than half of the budget, and every other disk
//!   keeps its reserve.
//! - Adding a disk makes all reserves smaller, but disks keep what they hold. If that cuts into another disk's reserve,
//!   only the rest of the reserve is available.
//! - Part of the machine's resources is outside the budget, because the server needs it for its own images, threads and
//!   sockets.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource as Rlimit, getrlimit};

use crate::closing::{Closing, Held};

/// Default of `vm.max_map_count`, for hosts that do not report it.
const USUAL_MAPPINGS: u64 = 65_530;
/// Limit of descriptors assumed for a process without a limit (`fs.nr_open`).
const MOST_DESCRIPTORS: u64 = 1 << 20;

/// A limited resource of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Bytes of address space used by mappings, with or without pages behind them.
    AddressSpace,
    /// Mappings, whatever their length (`vm.max_map_count`).
    Mappings,
    /// Open files (`RLIMIT_NOFILE`).
    Descriptors,
}

impl Resource {
    const ALL: [Self; 3] = [Self::AddressSpace, Self::Mappings, Self::Descriptors];

    fn name(self) -> &'static str {
        match self {
            Self::AddressSpace => "bytes of address space",
            Self::Mappings => "mappings",
            Self::Descriptors => "file descriptors",
        }
    }

    fn cure(self) -> &'static str {
        match self {
            Self::AddressSpace => "run a separate server for a guest that needs so much",
            Self::Mappings => "raise vm.max_map_count, or run a separate server for the guest",
            Self::Descriptors => "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)",
        }
    }
}

/// Why a disk's request for a resource was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} more {} are needed, but only {left} are left for this disk, which uses {taken} of the {limit} for all disks: {}",
    resource.name(), resource.cure()
)]
pub struct QuotaError {
    /// The resource.
    pub resource: Resource,
    /// Requested amount.
    pub wanted: u64,
    /// The largest amount that would have been granted.
    pub left: u64,
    /// The disk's current use.
    pub taken: u64,
    /// The whole budget.
    pub limit: u64,
}

/// Limits for the front-ends of all disks together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// See [`Resource::AddressSpace`].
    pub address_space_bytes: u64,
    /// See [`Resource::Mappings`].
    pub mappings: u64,
    /// See [`Resource::Descriptors`].
    pub descriptors: u64,
}

impl Limits {
    /// Half of the process's address space, and three quarters of its mappings and descriptors. The rest is
    /// for the server.
    #[must_use]
    pub fn of_process() -> Self {
        let most_mapped = getrlimit(Rlimit::As).current.unwrap_or(u64::MAX);
        let mappings = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let mappings = mappings.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL_MAPPINGS);
        let descriptors = getrlimit(Rlimit::Nofile).current.unwrap_or(MOST_DESCRIPTORS);
        let for_front_ends = |number: u64| number - number / 4;
        Self {
            address_space_bytes: address_space_bytes().min(most_mapped) / 2,
            mappings: for_front_ends(mappings),
            descriptors: for_front_ends(descriptors),
        }
    }
}

/// The size of the address space: a power of two, derived from the stack's address, because stacks lie close to the end
/// of the address space on every machine.
fn address_space_bytes() -> u64 {
    let on_the_stack = 0_u8;
    let bits = u64::BITS - ((&raw const on_the_stack).addr() as u64).leading_zeros();
    1_u64.checked_shl(bits).unwrap_or(u64::MAX)
}

/// The use of one resource by all disks.
#[derive(Clone, Copy, Debug)]
struct Pool {
    limit: u64,
    taken: u64,
    /// Sum of the unused parts of all reserves.
    unused_reserves: u64,
}

#[derive(Debug)]
struct State {
    pools: [Pool; 3],
    /// Each disk's current use, by disk number.
    disks: HashMap<u64, [u64; 3]>,
    next_disk: u64,
}

impl State {
    fn reserve(&self, resource: Resource) -> u64 {
        self.pools[resource as usize].limit / 2 / (self.disks.len() as u64).max(1)
    }

    /// Recomputes the reserves after a disk was added or removed.
    fn deal_out(&mut self) {
        for resource in Resource::ALL {
            let reserve = self.reserve(resource);
            let unused = self.disks.values().map(|taken| reserve.saturating_sub(taken[resource as usize]));
            self.pools[resource as usize].unused_reserves = unused.sum();
        }
    }

    fn taken(&self, disk: u64, resource: Resource) -> u64 {
        self.disks.get(&disk).map_or(0, |taken| taken[resource as usize])
    }

    fn free(&self, resource: Resource) -> u64 {
        let pool = self.pools[resource as usize];
        pool.limit.saturating_sub(pool.taken)
    }

    fn left(&self, disk: u64, resource: Resource) -> u64 {
        let pool = self.pools[resource as usize];
        let own = self.reserve(resource).saturating_sub(self.taken(disk, resource));
        let free = self.free(resource);
        // Either the disk's own reserve, as far as it is still free, or everything that is not another disk's
        // reserve.
        own.min(free).max(free.saturating_sub(pool.unused_reserves.saturating_sub(own)))
    }

    fn set(&mut self, disk: u64, resource: Resource, to: u64) {
        let (reserve, from) = (self.reserve(resource), self.taken(disk, resource));
        let pool = &mut self.pools[resource as usize];
        pool.taken = pool.taken - from + to;
        let unused = |taken| reserve.saturating_sub(taken);
        pool.unused_reserves = pool.unused_reserves - unused(from) + unused(to);
        if let Some(taken) = self.disks.get_mut(&disk) {
            taken[resource as usize] = to;
        }
    }
}

/// The budget. See the module documentation.
#[derive(Debug)]
pub struct Budget(Mutex<State>);

impl Budget {
    /// A budget that is entirely free.
    #[must_use]
    pub fn new(limits: Limits) -> Arc<Self> {
        let Limits { address_space_bytes, mappings, descriptors } = limits;
        let pools = [address_space_bytes, mappings, descriptors];
        let pools = pools.map(|limit| Pool { limit, taken: 0, unused_reserves: 0 });
        Arc::new(Self(Mutex::new(State { pools, disks: HashMap::new(), next_disk: 0 })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One disk's part of a budget. The disk counts until its last charge is released.
#[derive(Debug)]
pub struct Quota {
    budget: Arc<Budget>,
    disk: u64,
    closing: Arc<Closing>,
}

impl Quota {
    /// Adds a disk to the budget.
    #[must_use]
    pub fn of(budget: &Arc<Budget>) -> Arc<Self> {
        let mut state = budget.lock();
        let disk = state.next_disk;
        state.next_disk += 1;
        state.disks.insert(disk, [0; 3]);
        state.deal_out();
        drop(state);
        Arc::new(Self { budget: Arc::clone(budget), disk, closing: Arc::default() })
    }

    /// Takes `amount` until the charge is dropped.
    ///
    /// # Errors
    /// [`QuotaError`]; nothing is taken then.
    pub fn charge(self: &Arc<Self>, resource: Resource, amount: u64) -> Result<Charge, QuotaError> {
        self.charge_by(Grant::Asked, resource, amount)
    }

    fn charge_by(
        self: &Arc<Self>,
        grant: Grant,
        resource: Resource,
        amount: u64,
    ) -> Result<Charge, QuotaError> {
        let mut state = self.budget.lock();
        let taken = state.taken(self.disk, resource);
        let left = match grant {
            Grant::Asked => state.left(self.disk, resource),
            Grant::Inherited => state.free(resource),
        };
        if amount > left {
            let limit = state.pools[resource as usize].limit;
            return Err(QuotaError { resource, wanted: amount, left, taken, limit });
        }
        state.set(self.disk, resource, taken + amount);
        drop(state);
        Ok(Charge { quota: Arc::clone(self), resource, amount, grant })
    }

    /// Charges a descriptor that a front-end passed.
    ///
    /// # Errors
    /// [`QuotaError`]; the descriptor is closed then, as a dropped [`PassedFd`] is.
    pub fn admit(self: &Arc<Self>, fd: OwnedFd) -> Result<PassedFd, QuotaError> {
        self.admit_by(Grant::Asked, fd)
    }

    /// Charges a descriptor that the predecessor of this server process admitted. Only free resources limit the
    /// descriptor and its mappings; the current reserves of other disks do not.
    ///
    /// # Errors
    /// [`QuotaError`]; the descriptor is closed then, as a dropped [`PassedFd`] is.
    pub fn inherit(self: &Arc<Self>, fd: OwnedFd) -> Result<PassedFd, QuotaError> {
        self.admit_by(Grant::Inherited, fd)
    }

    fn admit_by(self: &Arc<Self>, grant: Grant, fd: OwnedFd) -> Result<PassedFd, QuotaError> {
        let fd = Arc::new(fd);
        match self.charge_by(grant, Resource::Descriptors, 1) {
            Ok(charge) => Ok(PassedFd { fd, charge: Arc::new(charge) }),
            Err(error) => {
                self.closing.close(&fd, None);
                Err(error)
            }
        }
    }

    /// Closes a descriptor that a front-end passed or controls, on another thread if closing may wait.
    pub fn close(&self, fd: &Arc<OwnedFd>) {
        self.closing.close(fd, None);
    }

    /// Whether too many uncharged descriptors wait to be closed. If so, this disk's front-ends must not pass any more.
    #[must_use]
    pub fn is_clogged(&self) -> bool {
        self.closing.is_clogged()
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        // Every charge holds the quota, so no charge is left when the quota is dropped.
        state.disks.remove(&self.disk);
        state.deal_out();
    }
}

/// The rule that allows an amount to be taken.
#[derive(Clone, Copy, Debug)]
enum Grant {
    Asked,
    /// The process that this one replaced in a live upgrade had already granted the amount.
    Inherited,
}

/// An amount in use; released when dropped.
#[derive(Debug)]
pub struct Charge {
    quota: Arc<Quota>,
    resource: Resource,
    amount: u64,
    grant: Grant,
}

impl Charge {
    /// Takes a further amount for the same disk, under the same rule.
    ///
    /// # Errors
    /// [`QuotaError`]; nothing more is taken then.
    pub fn further(&self, resource: Resource, amount: u64) -> Result<Self, QuotaError> {
        self.quota.charge_by(self.grant, resource, amount)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut state = self.quota.budget.lock();
        let taken = state.taken(self.quota.disk, self.resource);
        state.set(self.quota.disk, self.resource, taken - self.amount);
    }
}

/// A descriptor that a front-end passed, charged to its disk until it is closed. Dropping it closes it, on another
/// thread if closing may wait (`closing.rs`).
#[derive(Debug)]
pub struct PassedFd {
    fd: Arc<OwnedFd>,
    charge: Arc<Charge>,
}

impl PassedFd {
    /// The descriptor. The caller must not keep it longer than this value.
    #[must_use]
    pub fn shared(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    pub(crate) fn charge(&self) -> &Charge {
        &self.charge
    }
}

impl Drop for PassedFd {
    fn drop(&mut self) {
        self.charge.quota.closing.close(&self.fd, Some(Arc::clone(&self.charge) as Held));
    }
}

impl AsFd for PassedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::Resource::{AddressSpace, Descriptors, Mappings};
    use super::*;

    fn budget(limit: u64) -> Arc<Budget> {
        Budget::new(Limits { address_space_bytes: limit, mappings: limit, descriptors: limit })
    }

    fn quotas<const N: usize>(budget: &Arc<Budget>) -> [Arc<Quota>; N] {
        [(); N].map(|()| Quota::of(budget))
    }

    /// Takes one mapping after another until the quota refuses.
    fn take_all(quota: &Arc<Quota>) -> Vec<Charge> {
        (0..).map_while(|_| quota.charge(Mappings, 1).ok()).collect()
    }

    #[test]
    fn disk_alone_may_have_all_of_it() {
        let [alone] = quotas(&budget(100));
        assert_eq!(take_all(&alone).len(), 100);
    }

    #[test]
    fn disks_that_take_all_they_can_leave_every_other_its_reserve() {
        let budget = budget(100);
        let [greedy, other, quiet, late] = quotas(&budget);
        let (first, second) = (take_all(&greedy), take_all(&other));
        // A reserve of 12 each, and the first one also has the other half.
        assert_eq!((first.len(), second.len()), (100 - 3 * 12, 12));
        assert_eq!((take_all(&quiet).len(), take_all(&late).len()), (12, 12));
    }

    #[test]
    fn what_is_given_back_can_be_taken_again_by_another_disk() {
        let [first, second] = quotas(&budget(100));
        let charge = first.charge(AddressSpace, 75).unwrap();
        assert_eq!(second.charge(AddressSpace, 26).unwrap_err().left, 25);
        drop(charge);
        assert!(second.charge(AddressSpace, 75).is_ok());
    }

    #[test]
    fn refusal_takes_nothing_and_names_what_there_is() {
        let [first, _second] = quotas(&budget(100));
        let _charge = first.charge(Descriptors, 70).unwrap();
        let refused = first.charge(Descriptors, u64::MAX).unwrap_err();
        let expected = QuotaError { resource: Descriptors, wanted: u64::MAX, left: 5, taken: 70, limit: 100 };
        assert_eq!(refused, expected);
        assert_eq!(
            refused.to_string(),
            "18446744073709551615 more file descriptors are needed, but only 5 are left for this disk, which uses 70 of the 100 for \
             all disks: raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)"
        );
        assert!(first.charge(Descriptors, 5).is_ok());
    }

    #[test]
    fn resources_are_counted_apart() {
        let [alone] = quotas(&budget(10));
        let _bytes = alone.charge(AddressSpace, 10).unwrap();
        assert!(alone.charge(Mappings, 10).is_ok() && alone.charge(Descriptors, 10).is_ok());
    }

    #[test]
    fn disks_added_beside_one_that_has_much_get_what_is_left_and_their_reserves_when_it_goes() {
        let budget = budget(100);
        let [greedy, _other] = quotas(&budget);
        let taken = greedy.charge(Mappings, 75).unwrap();
        let late: [Arc<Quota>; 8] = quotas(&budget);
        // Reserves are now 5 each; 25 are free for the disks that ask first.
        let had: Vec<_> = late.iter().map(|quota| quota.charge(Mappings, 5)).collect();
        assert_eq!(had.iter().filter(|charge| charge.is_ok()).count(), 5);
        drop((had, taken));
        let had: Vec<_> = late.iter().map(|quota| quota.charge(Mappings, 5).unwrap()).collect();
        assert_eq!(greedy.charge(Mappings, 56).unwrap_err().left, 55);
        drop(had);
    }

    #[test]
    fn what_was_granted_before_is_inherited_from_the_reserves_of_disks_that_came_since() {
        let [greedy, other] = quotas(&budget(100));
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let passed = greedy.inherit(fd()).unwrap();
        assert!(greedy.charge(Mappings, 80).is_err());
        let charge = passed.charge.further(Mappings, 80).unwrap();
        assert_eq!(passed.charge.further(Mappings, 21).unwrap_err().left, 20);
        assert_eq!(other.charge(Mappings, 21).unwrap_err().left, 20);
        drop(charge);
        assert!(other.charge(Mappings, 75).is_ok());
    }

    #[test]
    fn disk_counts_until_its_last_charge_is_given_back() {
        let budget = budget(100);
        let [goes, stays] = quotas(&budget);
        let charge = goes.charge(Mappings, 60).unwrap();
        drop(goes);
        assert_eq!(take_all(&stays).len(), 40);
        drop(charge);
        assert_eq!(take_all(&stays).len(), 100);
    }

    #[test]
    #[cfg_attr(miri, ignore = "looks at the machine")]
    fn process_has_room_for_large_guests_and_keeps_some_for_itself() {
        let limits = Limits::of_process();
        let descriptors = getrlimit(Rlimit::Nofile).current.unwrap_or(u64::MAX);
        assert!(limits.mappings > 0 && limits.descriptors > 0 && limits.descriptors <= descriptors);
        #[cfg(target_arch = "x86_64")]
        assert!(getrlimit(Rlimit::As).current.is_some() || limits.address_space_bytes == 1 << 46);
    }
}
