//! The real device side and its model. Both perform each action, and the results are compared.

use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};
use virtqueue::{Chain, ChainFault, DeviceQueue, LogArea, PopError, RingFault, RingFeatures, RingLayout};

use super::model::{AVAIL_RING, Buffers, DESCRIPTORS, Packed, Place, Refusal, Rules, Said, Split, USED_RING};
use crate::guest::Guest;

/// The guest has two adjacent regions; this is the size of the first.
pub(super) const FIRST_REGION: u64 = 0x4000;
/// Addresses of tables. The last two end in the second region; one of them is not aligned to words.
pub(super) const TABLES: [u64; 4] = [0x1000, 0x1800, FIRST_REGION - 40, FIRST_REGION - 33];
pub(super) const LOG_BYTES: u64 = 0x1000;
/// Number of entries of the log. A front-end may announce more entries than any ring has.
pub(super) const LOG_ENTRIES: u16 = 20;

/// The model of a running ring.
#[derive(Clone, Debug)]
enum Model {
    Split(Split),
    Packed(Packed),
}

/// The actions of one device since it started.
struct Running {
    device: DeviceQueue,
    model: Model,
    chain: Chain,
    /// Tags popped and not yet used. `true`: an earlier device popped it too, so only the log has its length.
    in_flight: Vec<(u16, bool)>,
    /// Whether the last pop can be undone.
    popped_last: bool,
    has_log: bool,
    /// The next used descriptor of a packed ring, or the next used entry of a split one.
    used_place: Place,
    used_idx: u16,
    /// The first used entry that is not published: position and bytes.
    unpublished_first: Option<(Place, [u8; 8])>,
    pushed: u16,
    /// Number of descriptors whose log entries become free when they are published.
    freed: u16,
    /// The used index when the device last decided whether to notify.
    asked_at: u16,
    /// Whether the ring is broken, so that the device takes nothing more.
    stopped: bool,
}

/// The device, its model and their memory.
pub(super) struct Machine {
    pub guest: Guest,
    pub log: Arc<GuestMemory>,
    pub features: RingFeatures,
    size: u16,
    pub limit: u16,
    running: Option<Running>,
    position: u32,
    /// The driver's position, for chains that it offers one after another.
    driver_place: Place,
}

pub(super) fn layout(queue_size: u16) -> RingLayout {
    RingLayout {
        queue_size,
        descriptors: GuestAddress(DESCRIPTORS),
        avail: GuestAddress(AVAIL_RING),
        used: GuestAddress(USED_RING),
    }
}

impl Machine {
    pub fn new(features: RingFeatures, size: u16, limit: u16) -> Self {
        let log = Region::from_memfd(GuestAddress(0), LOG_BYTES).expect("a memfd");
        Self {
            guest: Guest::new(&[FIRST_REGION, FIRST_REGION]),
            log: Arc::new(GuestMemory::new(vec![Arc::new(log)]).expect("one region")),
            features,
            size,
            limit: limit.max(size),
            running: None,
            position: 0,
            driver_place: Place { slot: 0, wrap: true },
        }
    }

    pub fn size(&self) -> u16 {
        self.size
    }

    /// The position of the running device, or of the last one.
    pub fn position(&self) -> u32 {
        self.running.as_ref().map_or(self.position, |running| running.device.position())
    }

    /// A descriptor's bytes in the format's order. In a packed ring, it is available at the driver's position.
    pub fn descriptor(&self, addr: u64, len: u32, flags: u16, other: u16) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        let avail = if self.driver_place.wrap { 1 << 7 } else { 1 << 15 };
        let words = if self.features.packed { [other, flags | avail] } else { [flags, other] };
        bytes[12..14].copy_from_slice(&words[0].to_le_bytes());
        bytes[14..].copy_from_slice(&words[1].to_le_bytes());
        bytes
    }

    /// Replaces the running device by a new one, with or without the log.
    pub fn start(&mut self, with_log: bool, base: u32) {
        self.position = self.position();
        self.running = None;
        let (at, area) = (layout(self.size), LogArea::new(Arc::clone(&self.log), 0, LOG_ENTRIES));
        let started = if with_log {
            DeviceQueue::with_log(&self.guest.view, at, self.features, base, &area)
        } else {
            DeviceQueue::new(&self.guest.view, at, self.features, base)
        };
        let Ok(device) = started else { return };
        let device = device.with_indirect_limit(self.limit);
        assert!(device.to_redo() <= self.size, "more requests to redo than the ring has descriptors");
        self.running = Some(Running::new(device, self.rules(), with_log, &self.guest));
    }

    fn rules(&self) -> Rules {
        Rules { size: self.size, indirect: self.features.indirect, limit: self.limit }
    }

    /// Offers this head in a split ring. In a packed ring, advances the position as if a descriptor had been offered.
    pub fn offer(&mut self, head: u16) {
        if self.features.packed {
            self.driver_place = self.driver_place.forward(head % (self.size + 1), self.size);
            return;
        }
        let idx = Split::avail_idx(&self.guest);
        let head = if head < 0xf0 { head % self.size } else { head << 8 };
        self.guest.store(AVAIL_RING + 4 + 2 * u64::from(idx % self.size), &head.to_le_bytes());
        self.guest.store(AVAIL_RING + 2, &idx.wrapping_add(1).to_le_bytes());
    }

    /// Offers a well-formed chain: `readable` buffers, then writable ones.
    pub fn offer_chain(&mut self, readable: usize, more: u8) {
        let readable = u16::try_from(readable).unwrap_or(0).min(self.size - 1);
        let (writable, id) =
            (u16::from(more & 3).max(1).min(self.size - readable), u16::from(more >> 4) % self.size);
        let count = readable + writable;
        for at in 0..count {
            let next = if at + 1 == count { 0 } else { 1 };
            let write = if at < readable { 0 } else { 2 };
            let (addr, flags) = (0x2000 + 0x40 * u64::from(at), next | write);
            let (slot, other) = if self.features.packed {
                (self.driver_place.slot, id)
            } else {
                ((id + at) % self.size, (id + at + 1) % self.size)
            };
            let bytes = self.descriptor(addr, 0x40, flags, other);
            self.guest.store(DESCRIPTORS + 16 * u64::from(slot), &bytes);
            if self.features.packed {
                self.driver_place = self.driver_place.forward(1, self.size);
            }
        }
        if !self.features.packed {
            self.offer(id);
        }
    }

    pub fn scribble_log(&mut self, at: u64, bytes: &[u8]) {
        MemoryView::new(Arc::clone(&self.log)).store(at, bytes).expect("inside the log");
    }

    pub fn pop(&mut self) {
        if let Some(running) = self.running.as_mut().filter(|running| !running.stopped) {
            running.pop(&self.guest);
        }
    }

    pub fn unpop(&mut self) {
        if let Some(running) = self.running.as_mut().filter(|running| running.popped_last) {
            running.unpop();
        }
    }

    pub fn push(&mut self, which: usize, written_bytes: u32) {
        if let Some(running) = &mut self.running {
            running.push(which, written_bytes, &self.guest);
        }
    }

    pub fn publish(&mut self) {
        if let Some(running) = &mut self.running {
            running.publish(&self.guest);
        }
    }

    /// Makes the device decide about kicks and calls.
    pub fn ask(&mut self, what: u8) {
        let Some(running) = &mut self.running else { return };
        running.popped_last = false;
        match what % 4 {
            0 => running.ask_available(&self.guest, |device| device.available().map(|count| count != 0)),
            1 => running.ask_available(&self.guest, DeviceQueue::enable_kicks),
            2 => running.device.disable_kicks(),
            _ => running.ask_notification(&self.guest, self.features.event_idx),
        }
    }

    /// Checks that nothing outside the device's own parts has changed.
    pub fn check_memory(&self) {
        let (size, place) = (usize::from(self.size), |at: u64| usize::try_from(at).unwrap_or(usize::MAX));
        let (ring, used) = (place(DESCRIPTORS), place(USED_RING));
        let its = if self.features.packed {
            [ring..ring + 16 * size, used..used + 4]
        } else {
            [used..used + 4 + 8 * size + 2, 0..0]
        };
        self.guest.check_untouched_but(&its);
    }
}

impl Running {
    fn new(device: DeviceQueue, rules: Rules, has_log: bool, guest: &Guest) -> Self {
        let position = device.position();
        #[allow(clippy::cast_possible_truncation)] // takes the halves apart
        let (low, high) = (position as u16, (position >> 16) as u16);
        let (next, used_place) = (Place::of_bits(low), Place::of_bits(high));
        let model = if matches!(device, DeviceQueue::Packed(_)) {
            let taken = next.since(used_place, rules.size);
            assert!(taken <= rules.size, "an impossible position: {position:#x}");
            let log_room = has_log.then(|| LOG_ENTRIES - taken);
            Model::Packed(Packed {
                rules,
                next,
                room: rules.size - taken,
                log_room,
                counts: [0; 16],
                again: [false; 16],
            })
        } else {
            Model::Split(Split { rules, next: low, known: low })
        };
        let used_idx = u16::from_le_bytes(guest.read(USED_RING + 2).expect("inside the memory"));
        Self {
            device,
            model,
            chain: Chain::with_capacity(rules.limit),
            in_flight: Vec::new(),
            popped_last: false,
            has_log,
            used_place,
            used_idx,
            unpublished_first: None,
            pushed: 0,
            freed: 0,
            asked_at: used_idx,
            stopped: false,
        }
    }

    fn size(&self) -> u16 {
        self.device.queue_size()
    }

    fn pop(&mut self, guest: &Guest) {
        self.popped_last = false;
        let (is_again, before) = (self.device.to_redo() > 0, self.model.clone());
        let popped = self.device.pop(&mut self.chain);
        let said = match (&mut self.model, is_again) {
            (Model::Split(model), true) => popped_tag(&popped).map(|tag| {
                assert!(tag < model.rules.size, "head {tag} from the log is outside the ring");
                Said::Taken { tag, buffers: model.walk(guest, tag) }
            }),
            // A packed ring's chain may exist only in the log.
            (Model::Packed(_), true) => None,
            (Model::Split(model), false) => Some(model.pop(guest)),
            (Model::Packed(model), false) => Some(model.pop(guest)),
        };
        match said {
            Some(said) => self.compare(&popped, &said, &before),
            None => assert!(popped_tag(&popped).is_some(), "a request to redo was expected, not {popped:?}"),
        }
        self.account(&popped, is_again);
    }

    fn compare(&self, popped: &Result<Option<u16>, PopError>, said: &Said, model: &Model) {
        let agree = match (popped, said) {
            (Ok(None), Said::Nothing) => true,
            (Ok(Some(tag)), Said::Taken { tag: theirs, buffers: Ok(buffers) }) => {
                tag == theirs && *buffers == self.buffers()
            }
            (Err(PopError::Chain { tag, fault }), Said::Taken { tag: theirs, buffers: Err(refusal) }) => {
                tag == theirs && self.is_same_refusal(fault, refusal)
            }
            (Err(PopError::Ring(_)), Said::Stop) => true,
            _ => false,
        };
        assert!(agree, "device: {popped:?} {:?}\nmodel: {said:?} {model:?}", self.buffers());
    }

    fn is_same_refusal(&self, fault: &ChainFault, refusal: &Refusal) -> bool {
        match refusal {
            Refusal::Structure => {
                *fault != ChainFault::ReadableAfterWritable && self.buffers() == Buffers::default()
            }
            Refusal::Order { writable } => {
                *fault == ChainFault::ReadableAfterWritable && *writable == self.buffers().writable
            }
        }
    }

    fn buffers(&self) -> Buffers {
        let pairs = |ranges: &[guest_mem::GuestRange]| ranges.iter().map(|r| (r.addr, r.len_bytes)).collect();
        let (readable, writable) = (self.chain.readable(), self.chain.writable());
        let sum =
            |ranges: &[guest_mem::GuestRange]| ranges.iter().map(|r| u64::from(r.len_bytes)).sum::<u64>();
        assert_eq!(sum(readable), self.chain.readable_bytes());
        assert_eq!(sum(writable), self.chain.writable_bytes());
        Buffers { readable: pairs(readable), writable: pairs(writable) }
    }

    /// Accounts for the pop as the owner of the queue does.
    fn account(&mut self, popped: &Result<Option<u16>, PopError>, is_again: bool) {
        match popped {
            Ok(None) => {}
            Err(PopError::Ring(_)) => self.stopped = true,
            Ok(Some(tag)) | Err(PopError::Chain { tag, .. }) => {
                let twice = self.in_flight.iter().any(|(known, _)| known == tag);
                assert!(!twice || matches!(self.model, Model::Split(_)), "buffer id {tag} taken twice");
                self.stopped |= twice;
                if !twice {
                    self.in_flight.push((*tag, is_again));
                    self.mark_again(*tag, is_again);
                    self.popped_last = popped.is_ok();
                }
            }
        }
    }

    fn mark_again(&mut self, tag: u16, is_again: bool) {
        if let Model::Packed(model) = &mut self.model {
            model.again[usize::from(tag)] = is_again;
        }
    }

    fn unpop(&mut self) {
        self.popped_last = false;
        let Some((tag, is_again)) = self.in_flight.pop() else { return };
        self.mark_again(tag, false);
        self.device.unpop();
        match &mut self.model {
            _ if is_again => {}
            Model::Split(model) => model.next = model.next.wrapping_sub(1),
            Model::Packed(model) => {
                let count = std::mem::take(&mut model.counts[usize::from(tag)]);
                let lap = 2 * model.rules.size;
                model.next = model.next.forward(lap - count, model.rules.size);
                model.room += count;
                model.log_room = model.log_room.map(|left| left + count);
            }
        }
    }

    fn push(&mut self, which: usize, written_bytes: u32, guest: &Guest) {
        if self.in_flight.is_empty() {
            return;
        }
        self.popped_last = false;
        let (tag, _) = self.in_flight.remove(which % self.in_flight.len());
        self.mark_again(tag, false);
        let before = self.device.position();
        self.device.push_used(tag, written_bytes);
        self.pushed += 1;
        let size = self.size();
        match &mut self.model {
            Model::Split(_) => {
                let slot = u64::from(self.used_idx.wrapping_add(self.pushed - 1) % size);
                let entry = guest.read::<8>(USED_RING + 4 + 8 * slot).expect("inside the memory");
                let wanted = u64::from(tag) | u64::from(written_bytes) << 32;
                assert_eq!(u64::from_le_bytes(entry), wanted, "used entry {slot}");
            }
            Model::Packed(model) => {
                let bits = |position: u32| Place::of_bits(u16::try_from(position >> 16).unwrap_or(0));
                let (from, to) = (bits(before), bits(self.device.position()));
                assert_eq!(from, self.used_place);
                let moved = to.since(from, size);
                let known = std::mem::take(&mut model.counts[usize::from(tag)]);
                // If only the log has the chain, the device determines its length.
                assert!((1..=size).contains(&moved) && (known == 0 || known == moved), "{known} {moved}");
                (model.room, self.freed, self.used_place) = (model.room + moved, self.freed + moved, to);
                let write = if written_bytes == 0 { 0 } else { 2 };
                let (len, flags) = (u64::from(written_bytes), u64::from(from.used_flags() | write));
                let wanted = (len | u64::from(tag) << 32 | flags << 48).to_le_bytes();
                if self.unpublished_first.is_none() {
                    self.unpublished_first = Some((from, wanted));
                } else {
                    check_slot(guest, from, wanted);
                }
            }
        }
    }

    fn publish(&mut self, guest: &Guest) {
        self.popped_last = false;
        let pushed = std::mem::take(&mut self.pushed);
        assert_eq!(self.device.publish(), pushed != 0);
        self.used_idx = self.used_idx.wrapping_add(pushed);
        let freed = std::mem::take(&mut self.freed);
        match &mut self.model {
            Model::Split(_) if pushed != 0 => {
                let idx = guest.read(USED_RING + 2).expect("inside the memory");
                assert_eq!(u16::from_le_bytes(idx), self.used_idx, "used.idx");
            }
            Model::Split(_) => {}
            Model::Packed(model) => {
                model.log_room = model.log_room.map(|left| left + freed);
                assert!(self.has_log || model.log_room.is_none());
                if let Some((place, wanted)) = self.unpublished_first.take() {
                    check_slot(guest, place, wanted);
                }
            }
        }
    }

    fn ask_available(
        &mut self,
        guest: &Guest,
        ask: impl FnOnce(&mut DeviceQueue) -> Result<bool, RingFault>,
    ) {
        let redo = self.device.to_redo() > 0;
        let wanted = match &self.model {
            Model::Split(model) => {
                let count = Split::avail_idx(guest).wrapping_sub(model.next);
                (count <= model.rules.size).then_some(count > 0 || redo)
            }
            Model::Packed(model) => Some(model.is_available(guest) || redo),
        };
        assert_eq!(ask(&mut self.device).ok(), wanted, "whether anything is available");
    }

    /// Checks a split ring's decision to notify (virtio 1.3 §2.7.7.2). Packed rings have too many rules for a simple
    /// model, so their decisions are not checked.
    fn ask_notification(&mut self, guest: &Guest, event_idx: bool) {
        let says = self.device.needs_notification();
        if let Model::Split(model) = &self.model {
            let (old, new) = (std::mem::replace(&mut self.asked_at, self.used_idx), self.used_idx);
            let word = |at| u16::from_le_bytes(guest.read(at).expect("inside the memory"));
            let event = word(AVAIL_RING + 4 + 2 * u64::from(model.rules.size));
            let wanted = if event_idx {
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            } else {
                old != new && word(AVAIL_RING) & 1 == 0
            };
            assert_eq!(says, wanted, "notification: event {event}, used {old} to {new}");
        }
    }
}

fn check_slot(guest: &Guest, place: Place, wanted: [u8; 8]) {
    let slot = u64::from(place.slot);
    let found = guest.read::<8>(DESCRIPTORS + 16 * slot + 8).expect("inside the memory");
    assert_eq!(found, wanted, "used descriptor in slot {slot}");
}

fn popped_tag(popped: &Result<Option<u16>, PopError>) -> Option<u16> {
    match popped {
        Ok(tag) => *tag,
        Err(PopError::Chain { tag, .. }) => Some(*tag),
        Err(PopError::Ring(_)) => None,
    }
}
