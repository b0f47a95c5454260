//! Counters of a run: instructions, memory accesses, wavefronts and floating-point operations.

use ptx::{BinaryOp, MmaShape, Op, Precision, TernaryOp, Type, UnaryOp};

use crate::trace::shared_passes;

/// Counts of one instruction over all warps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counter {
    /// Line of the PTX text.
    pub line: u32,
    /// Warp instructions issued, including those without an active lane.
    pub issues: u64,
    /// Active lanes, summed over the issues.
    pub lanes: u64,
    /// Warp accesses to shared memory.
    pub shared_accesses: u64,
    /// Wavefronts of these accesses: passes over the 32 banks.
    pub shared_passes: u64,
    /// Wavefronts that these accesses would need without bank conflicts.
    pub shared_ideal: u64,
    /// Bytes moved to or from shared memory.
    pub shared_bytes: u64,
    /// Warp accesses to global memory.
    pub global_accesses: u64,
    /// 32-byte sectors that these accesses touched.
    pub global_sectors: u64,
    /// Bytes that the lanes requested from global memory.
    pub global_bytes: u64,
    /// Bulk copies (TMA) issued. A copy counts once for each thread that issues it.
    pub bulk_copies: u64,
    /// Bytes that these copies move to or from the shared memory of one CTA, summed over the copies.
    pub bulk_bytes: u64,
    /// Bytes moved to or from local memory.
    pub local_bytes: u64,
    /// Floating-point operations of the tensor cores, or integer operations for s8 products. A multiply-add
    /// counts as two.
    pub tensor_flop: u64,
    /// Floating-point operations of the lanes. A multiply-add counts as two, and so does an operation on a
    /// packed pair.
    pub flop: u64,
    /// Operations of the special-function unit (`.approx` functions). A packed pair counts as two.
    pub special: u64,
}

impl Counter {
    /// Adds the counts of another instruction and takes over its line.
    pub fn add(&mut self, other: &Counter) {
        self.line = other.line;
        self.issues += other.issues;
        self.lanes += other.lanes;
        self.shared_accesses += other.shared_accesses;
        self.shared_passes += other.shared_passes;
        self.shared_ideal += other.shared_ideal;
        self.shared_bytes += other.shared_bytes;
        self.global_accesses += other.global_accesses;
        self.global_sectors += other.global_sectors;
        self.global_bytes += other.global_bytes;
        self.bulk_copies += other.bulk_copies;
        self.bulk_bytes += other.bulk_bytes;
        self.local_bytes += other.local_bytes;
        self.tensor_flop += other.tensor_flop;
        self.flop += other.flop;
        self.special += other.special;
    }

    /// Sets the counts that follow from the operation and the number of executions.
    pub(crate) fn set_work(&mut self, op: &Op) {
        let pair = |ty| if matches!(ty, Type::F16x2 | Type::Bf16x2 | Type::F32x2) { 2 } else { 1 };
        match *op {
            Op::Mma(ptx::Mma { shape, .. }) | Op::Wmma(ptx::Wmma { shape, .. }) => {
                let MmaShape { m, n, k } = shape;
                self.tensor_flop = self.issues * 2 * u64::from(m) * u64::from(n) * u64::from(k);
            }
            // Each of the four warps that issue a `wgmma` computes a quarter of the product.
            Op::Wgmma(ptx::Wgmma { shape: MmaShape { m, n, k }, .. }) => {
                self.tensor_flop = self.issues * 2 * u64::from(m / 4) * u64::from(n) * u64::from(k);
            }
            Op::Ternary(TernaryOp::Fma | TernaryOp::Mad, ty, _) => self.flop = 2 * pair(ty) * self.lanes,
            Op::Ternary(TernaryOp::Min | TernaryOp::Max, ..) => self.flop = 2 * self.lanes,
            Op::Binary(BinaryOp::Div, ty, mods) if ty.is_float() => {
                self.flop = self.lanes;
                if mods.precision == Precision::Approx {
                    self.special = self.lanes;
                }
            }
            Op::Binary(op, ty, _) if ty.is_float() && op != BinaryOp::Copysign => {
                self.flop = pair(ty) * self.lanes;
            }
            Op::Unary(op, ty, mods) if is_special(op) && ty.is_float() => {
                let approximate = mods.precision == Precision::Approx || op == UnaryOp::Tanh;
                let count = if approximate { &mut self.special } else { &mut self.flop };
                *count = pair(ty) * self.lanes;
            }
            _ => {}
        }
    }

    /// The number of wavefronts divided by the number without bank conflicts; 1 for an instruction that does
    /// not access shared memory.
    pub fn conflict_degree(&self) -> f64 {
        if self.shared_ideal == 0 { 1.0 } else { self.shared_passes as f64 / self.shared_ideal as f64 }
    }

    /// Counts a shared-memory access of so many passes.
    #[inline(always)]
    pub(crate) fn shared(&mut self, lanes: u32, bytes: u32, passes: u32) {
        let moved = u64::from(lanes.count_ones() * bytes);
        self.shared_accesses += 1;
        self.shared_passes += u64::from(passes);
        self.shared_ideal += ideal_passes(lanes, bytes).min(u64::from(passes));
        self.shared_bytes += moved;
    }

    /// Counts a global-memory access.
    pub(crate) fn global(&mut self, lanes: u32, addresses: &[u64; 32], bytes: u32) {
        self.global_accesses += 1;
        self.global_sectors += sectors(lanes, addresses, bytes);
        self.global_bytes += u64::from(lanes.count_ones() * bytes);
    }
}

fn is_special(op: UnaryOp) -> bool {
    use UnaryOp::{Cos, Ex2, Lg2, Rcp, Rsqrt, Sin, Sqrt, Tanh};
    matches!(op, Rcp | Sqrt | Rsqrt | Sin | Cos | Lg2 | Ex2 | Tanh)
}

/// The addresses of a shared-memory access from its first one on, and its passes. An access whose addresses
/// lie elsewhere, at a multiple of its width, has as many.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pattern {
    lanes: u32,
    bytes: u32,
    passes: u32,
    from_first: [u64; 32],
}

impl Pattern {
    /// The passes of an access by `lanes`, of which there is one at least. It is kept for the next access.
    #[inline(always)]
    pub(crate) fn passes(&mut self, lanes: u32, addresses: &[u64; 32], bytes: u32) -> u32 {
        let first = addresses[0];
        let mut differs =
            u64::from((self.lanes ^ lanes) | (self.bytes ^ bytes)) | (first % u64::from(bytes.max(4)));
        for (address, known) in addresses.iter().zip(&self.from_first) {
            differs |= address.wrapping_sub(first) ^ known;
        }
        if differs != 0 {
            let from_first = std::array::from_fn(|lane| addresses[lane].wrapping_sub(first));
            *self = Pattern { lanes, bytes, passes: passes(lanes, addresses, bytes), from_first };
        }
        self.passes
    }
}

/// [`shared_passes`] without allocation, for the common case of aligned units of 4, 8 or 16 bytes. Such a
/// unit occupies whole banks. Two units conflict when their addresses differ and they share a bank.
fn passes(lanes: u32, addresses: &[u64; 32], bytes: u32) -> u32 {
    let unit = u64::from(bytes.max(4));
    if !matches!(unit, 4 | 8 | 16) || lanes == 0 {
        return shared_passes(lanes, addresses, bytes);
    }
    let per_pass = (128 / unit) as usize;
    let mut total = 0;
    for first in (0..32).step_by(per_pass) {
        let group = (first..first + per_pass).filter(|l| lanes >> l & 1 == 1);
        let units = group.clone().map(|lane| addresses[lane] / unit);
        let (least, most) = units.fold((u64::MAX, 0), |(least, most), at| (least.min(at), most.max(at)));
        if most.saturating_sub(least) < per_pass as u64 {
            // Distinct consecutive units lie in distinct banks.
            total += u32::from(least <= most);
            continue;
        }
        // So do the units of swizzled rows, in another order.
        let banks =
            group.clone().fold(0u32, |set, lane| set | 1 << (addresses[lane] / unit % per_pass as u64));
        if banks.count_ones() as usize == group.clone().count() {
            total += 1;
            continue;
        }
        // For each set of banks, a linked list of the lanes that request distinct units in it.
        let mut head = [u8::MAX; 32];
        let mut next = [u8::MAX; 32];
        let mut load = [0u8; 32];
        let mut fullest = 0;
        for lane in group {
            let wanted = addresses[lane] / unit;
            let banks = wanted as usize % per_pass;
            let mut at = head[banks];
            while at != u8::MAX && addresses[usize::from(at)] / unit != wanted {
                at = next[usize::from(at)];
            }
            if at == u8::MAX {
                next[lane] = head[banks];
                head[banks] = lane as u8;
                load[banks] += 1;
                fullest = fullest.max(load[banks]);
            }
        }
        total += u32::from(fullest);
    }
    total
}

/// Passes without conflicts: one for each group of lanes that together move up to 128 bytes.
fn ideal_passes(lanes: u32, bytes: u32) -> u64 {
    let group = (128 / bytes.max(4)).clamp(1, 32);
    let first = u32::MAX >> (32 - group);
    (0..32).step_by(group as usize).filter(|at| lanes >> at & first != 0).count() as u64
}

/// The number of distinct 32-byte sectors.
fn sectors(lanes: u32, addresses: &[u64; 32], bytes: u32) -> u64 {
    regular_sectors(lanes, addresses, bytes)
        .or_else(|| ascending_sectors(lanes, addresses, bytes))
        .unwrap_or_else(|| sorted_sectors(lanes, addresses, bytes))
}

/// [`sectors`] if all lanes access one address or a row without gaps; `None` otherwise.
fn regular_sectors(lanes: u32, addresses: &[u64; 32], bytes: u32) -> Option<u64> {
    let step = addresses[1].wrapping_sub(addresses[0]);
    if lanes != !0 || step != 0 && step != u64::from(bytes) {
        return None;
    }
    // No early exit, so that the comparisons are made in vectors.
    let differs =
        (1..32).fold(0, |set, lane| set | (addresses[lane].wrapping_sub(addresses[lane - 1]) ^ step));
    let last = addresses[31].checked_add(u64::from(bytes) - 1)?;
    (differs == 0 && addresses[0] <= last).then(|| last / 32 - addresses[0] / 32 + 1)
}

/// [`sectors`] for addresses that do not descend from lane to lane; `None` for other addresses.
fn ascending_sectors(lanes: u32, addresses: &[u64; 32], bytes: u32) -> Option<u64> {
    let (mut count, mut end) = (0, None);
    for lane in (0..32).filter(|l| lanes >> l & 1 == 1) {
        let (first, last) = (addresses[lane] / 32, addresses[lane].saturating_add(u64::from(bytes) - 1) / 32);
        // An access touches the sectors of its first and last byte, and no others, because it has at most 32
        // bytes.
        count += match end {
            Some(end) if first < end => return None,
            Some(end) if first == end => u64::from(last > end),
            _ => 1 + u64::from(last > first),
        };
        end = Some(last);
    }
    Some(count)
}

fn sorted_sectors(lanes: u32, addresses: &[u64; 32], bytes: u32) -> u64 {
    let mut list = [0; 64];
    let mut count = 0;
    for lane in (0..32).filter(|l| lanes >> l & 1 == 1) {
        let (first, last) = (addresses[lane] / 32, addresses[lane].saturating_add(u64::from(bytes) - 1) / 32);
        list[count] = first;
        list[count + 1] = last;
        count += 2;
    }
    let list = &mut list[..count];
    if !list.is_sorted() {
        list.sort_unstable();
    }
    u64::from(count > 0) + list.windows(2).filter(|w| w[0] != w[1]).count() as u64
}

/// The counters of a whole run.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// One counter for each instruction of the module, indexed like
    /// [`trace::Event::pc`](crate::trace::Event::pc).
    pub instructions: Vec<Counter>,
    /// Static and dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// Warps of a CTA.
    pub warps: u32,
    /// CTA barriers that a warp passed, summed over warps.
    pub barriers: u64,
    /// Arrivals of warps at the cluster barrier.
    pub cluster_barriers: u64,
    /// Warp instructions issued with at most one active lane.
    pub single_lane_issues: u64,
    /// Warp instructions that the busiest warp of a CTA issued beyond the second busiest, between two
    /// barriers of all warps of the CTA. The other warps wait during these instructions.
    pub lone_warp_issues: u64,
    /// Warp instructions of the busiest warp, summed over the intervals between barriers: the critical path.
    pub critical_issues: u64,
    /// Texts that `printf` printed, including those that the report leaves out.
    pub prints: u64,
}

impl Counters {
    /// Adds the counts of another CTA, or of another launch of the same module. Sizes are those of the larger
    /// CTA.
    pub fn add(&mut self, other: &Counters) {
        if self.instructions.len() < other.instructions.len() {
            self.instructions.resize(other.instructions.len(), Counter::default());
        }
        for (mine, theirs) in self.instructions.iter_mut().zip(&other.instructions) {
            mine.add(theirs);
        }
        self.shared_bytes = self.shared_bytes.max(other.shared_bytes);
        self.warps = self.warps.max(other.warps);
        self.barriers += other.barriers;
        self.cluster_barriers += other.cluster_barriers;
        self.single_lane_issues += other.single_lane_issues;
        self.lone_warp_issues += other.lone_warp_issues;
        self.critical_issues += other.critical_issues;
        self.prints += other.prints;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_without_allocation_agrees() {
        let mut pattern = Pattern::default();
        for (step, bytes) in
            [(4u64, 4), (0, 4), (2, 2), (8, 8), (16, 16), (128, 4), (64, 16), (144, 16), (136, 8)]
        {
            let addresses = std::array::from_fn(|l| 1024 + (l as u64 * step) % 4096);
            for lanes in [!0, 0xff, 0x8001_0001, 0x5555_5555] {
                let expected = shared_passes(lanes, &addresses, bytes);
                assert_eq!(passes(lanes, &addresses, bytes), expected, "step {step}, lanes {lanes:#x}");
                for shift in [0, 2, 4, 16, 48, 128, 1 << 33] {
                    let addresses = addresses.map(|address| address + shift);
                    let expected = shared_passes(lanes, &addresses, bytes);
                    assert_eq!(pattern.passes(lanes, &addresses, bytes), expected, "step {step}, {shift} on");
                }
                let expected = sorted_sectors(lanes, &addresses, bytes);
                assert_eq!(sectors(lanes, &addresses, bytes), expected, "step {step}, lanes {lanes:#x}");
            }
        }
        let row = std::array::from_fn(|l| 4 * l as u64);
        assert_eq!((sectors(!0, &row, 4), ideal_passes(!0, 4)), (4, 1));
        assert_eq!((ideal_passes(!0, 16), ideal_passes(0xff, 16), ideal_passes(1, 2)), (4, 1, 1));
    }
}
