//! Cancels clusters that have not started, and reads the responses (PTX ISA, "clusterlaunchcontrol").

use ptx::{CancelQuery, Space};

use super::Env;
use super::access::{addresses, based};
use super::registers::for_lanes;
use super::units::{Payload, inside};
use super::warp::Warp;
use crate::decode::Inst;
use crate::memory::{RANK_SHIFT, resolve};
use crate::report::HazardKind;

/// The last four bytes of a response, which is opaque to a kernel.
const MAGIC: u32 = u32::from_le_bytes(*b"clc!");

/// Bytes of a response, and its alignment.
const BYTES: u32 = 16;

/// The response to a request that cancelled the cluster whose first CTA has this index, or that failed.
fn response(first: Option<[u32; 3]>) -> [u8; 16] {
    let [x, y, z] = first.unwrap_or([u32::MAX; 3]);
    let words = [x, y & 0xffff | z << 16, u32::from(first.is_some()), MAGIC];
    let mut bytes = [0; 16];
    bytes.chunks_exact_mut(4).zip(words).for_each(|(four, word)| four.copy_from_slice(&word.to_le_bytes()));
    bytes
}

/// The index in a response, which is `None` if the request failed; `Err` if these halves are no response.
fn first_cta([low, high]: [u64; 2]) -> Result<Option<[u32; 3]>, ()> {
    match ((high >> 32) as u32, high as u32) {
        (MAGIC, 0) => Ok(None),
        (MAGIC, 1) => Ok(Some([low as u32, (low >> 32) as u32 & 0xffff, (low >> 48) as u32])),
        _ => Err(()),
    }
}

impl Env<'_> {
    /// Executes `clusterlaunchcontrol.try_cancel`. The next cluster in the order of starts is cancelled.
    pub(super) fn try_cancel(&mut self, warp: &Warp, inst: &Inst, multicast: bool, mask: u32) {
        let rank = self.rank(warp);
        for_lanes(mask, |lane| {
            if let Some(line) = self.refusals[rank] {
                self.report(HazardKind::LaunchControl, inst, warp.index, lane, None, || {
                    format!("asks for another cluster, although line {line} has found that a request failed")
                });
            }
            let to = addresses(&warp.registers, inst)[lane];
            let signal = based(&warp.registers, inst.signal.0, inst.signal.1)[lane];
            if let Some(foreign) = [to, signal].into_iter().find(|at| !self.is_own(rank, *at)) {
                self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                    format!("the address {foreign:#x} is not in the shared memory of the CTA")
                });
                return;
            }
            let cluster = self.order.grid.unstarted.pop_front();
            let response = response(cluster.map(|cluster| self.facts.context.first_cta(cluster)));
            let all = 0..self.facts.ctas.len() as u64;
            let ranks = if multicast { all } else { rank as u64..rank as u64 + 1 };
            for rank in ranks {
                let [to, signal] = [to, signal].map(|at| rank << RANK_SHIFT | inside(resolve(at).1));
                if let Some(offset) = self.bulk_range(warp, inst, lane, to, BYTES, BYTES) {
                    self.depart(warp, inst, lane, (offset, BYTES), signal, Payload::Response(response), None);
                }
            }
        });
    }

    /// Whether an address, generic or of shared memory, is in the shared memory of a CTA.
    fn is_own(&self, rank: usize, address: u64) -> bool {
        let (space, at) = resolve(address);
        matches!(space, Space::Shared | Space::Global) && at >> RANK_SHIFT == rank as u64
    }

    /// Executes `clusterlaunchcontrol.query_cancel`.
    pub(super) fn query_cancel(&mut self, warp: &mut Warp, inst: &Inst, query: CancelQuery, mask: u32) {
        let [low, high] = [0, 1].map(|half| *warp.registers.get64(inst.s[half]));
        let mut canceled = 0;
        let mut index = [[u32::MAX; 32]; 3];
        for_lanes(mask, |lane| {
            let wrong = match first_cta([low[lane], high[lane]]) {
                Ok(Some(first)) => {
                    canceled |= 1 << lane;
                    index.iter_mut().zip(first).for_each(|(index, first)| index[lane] = first);
                    return;
                }
                Ok(None) if query == CancelQuery::IsCanceled => {
                    let rank = self.rank(warp);
                    self.refusals[rank] = self.refusals[rank].or(Some(inst.line));
                    return;
                }
                Ok(None) => "reads the index of a CTA from the response to a request that failed",
                Err(()) => "queries what is no response of clusterlaunchcontrol.try_cancel",
            };
            self.report(HazardKind::LaunchControl, inst, warp.index, lane, None, || wrong.into());
        });
        let [x, y, z] = index;
        match query {
            CancelQuery::IsCanceled => warp.registers.set_pred(inst.d[0], mask, canceled),
            CancelQuery::FirstCtaid => {
                let slots = self.facts.context.program.slots(inst);
                let parts = slots.iter().zip([x, y, z, [0; 32]]).filter(|(slot, _)| slot.is_some());
                parts.for_each(|(slot, part)| warp.registers.set32(*slot, mask, &part));
            }
            CancelQuery::FirstCtaidX => warp.registers.set32(inst.d[0], mask, &x),
            CancelQuery::FirstCtaidY => warp.registers.set32(inst.d[0], mask, &y),
            CancelQuery::FirstCtaidZ => warp.registers.set32(inst.d[0], mask, &z),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{first_cta, response};

    #[test]
    fn responses_hold_an_index() {
        let halves = |bytes: [u8; 16]| {
            [&bytes[..8], &bytes[8..]].map(|half| half.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
        };
        for index in [[0, 0, 0], [u32::MAX >> 1, 65535, 65535], [7, 1, 2]] {
            assert_eq!(first_cta(halves(response(Some(index)))), Ok(Some(index)));
        }
        assert_eq!(first_cta(halves(response(None))), Ok(None));
        assert_eq!(first_cta([0, 0]), Err(()));
    }
}
