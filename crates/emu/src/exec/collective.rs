//! Instructions that lanes of a warp execute together: `bar.warp.sync`, `shfl`, `vote`, `match`, `redux`, `elect`.

use ptx::{MatchMode, Op, ReduxOp, ShflMode, Type, VoteMode};

use super::Env;
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, State, Warp};
use crate::decode::{Class, Inst, Slot};
use crate::report::HazardKind;

impl Env<'_> {
    pub(super) fn collective(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        let members = match inst.op {
            Op::BarWarpSync | Op::Elect => inst.s[0],
            Op::Shfl(_) => inst.s[3],
            _ => inst.s[1],
        };
        if let Some(flow) = self.gather(warp, split, inst, members) {
            return flow;
        }
        let forced = std::mem::take(&mut split.forced);
        match inst.op {
            Op::BarWarpSync if forced => {}
            Op::BarWarpSync => {
                warp.view.meet(mask, warp.live);
                let carried = warp.sequential(mask);
                warp.inherit(mask, &carried);
            }
            Op::Shfl(mode) => self.shuffle(warp, inst, mode, mask),
            Op::Vote(mode) => vote(warp, inst, mode, mask),
            Op::Match(mode, _) => match_lanes(warp, inst, mode, mask),
            Op::Redux { op, ty, .. } => reduce(warp, inst, op, ty, mask),
            Op::Elect => {
                let leader = mask.trailing_zeros();
                warp.registers.set32(inst.d[0], mask, &[leader; 32]);
                warp.registers.set_pred(inst.d[1], mask, 1 << leader);
            }
            _ => {}
        }
        Flow::Next
    }

    /// Whether all lanes that the member mask names are here; otherwise what to do about it.
    fn gather(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, members: Slot) -> Option<Flow> {
        let masks = *warp.registers.get32(members);
        let first = split.mask.trailing_zeros() as usize;
        let members = masks[first];
        let mut same = 0;
        for_lanes(split.mask, |l| same |= u32::from(masks[l] == members) << l);
        if same != split.mask {
            warp.push_group(split, split.pc + 1);
            let mut other = split.clone();
            other.mask &= !same;
            split.mask = same;
            return Some(Flow::Again(other));
        }
        if split.mask & !members != 0 {
            let lane = (split.mask & !members).trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                format!("the lane executes it with a member mask {members:#010x} that does not name it")
            });
            return None;
        }
        let missing = members & warp.live & !split.mask;
        (missing != 0 && !split.forced).then_some(Flow::Wait(State::Lanes(members)))
    }

    /// PTX ISA, "shfl.sync": `c` holds the clamp in bits 0–4 and the segment mask in bits 8–12.
    fn shuffle(&mut self, warp: &mut Warp, inst: &Inst, mode: ShflMode, mask: u32) {
        let a = *warp.registers.get32(inst.s[0]);
        let b = *warp.registers.get32(inst.s[1]);
        let c = *warp.registers.get32(inst.s[2]);
        let mut result = a;
        let mut valid = 0u32;
        let mut absent = 0u32;
        let mut sources = [0; 32];
        for_lanes(mask, |lane| {
            let lane32 = lane as u32;
            let (b, clamp, segment) = (b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31);
            let max = lane32 & segment | clamp & !segment;
            let min = lane32 & segment;
            let (source, inside) = match mode {
                ShflMode::Up => (lane32.wrapping_sub(b), lane32 as i32 - b as i32 >= max as i32),
                ShflMode::Down => (lane32 + b, lane32 + b <= max),
                ShflMode::Bfly => (lane32 ^ b, lane32 ^ b <= max),
                ShflMode::Idx => (min | b & !segment, min | b & !segment <= max),
            };
            let source = if inside { source as usize & 31 } else { lane };
            sources[lane] = source;
            valid |= u32::from(inside) << lane;
            absent |= u32::from(mask >> source & 1 == 0) << lane;
            result[lane] = a[source];
        });
        if absent != 0 {
            let lane = absent.trailing_zeros() as usize;
            self.report(HazardKind::UninitialisedRead, inst, warp.index, lane, None, || {
                "the lane shuffles from a lane that does not take part: the value is undefined".into()
            });
        }
        if let Some(watch) = inst.watched {
            let watch = &self.context.program.watches[watch as usize];
            warp.undefined.shuffled(watch, inst.line, mask, &sources);
        }
        warp.registers.set32(inst.d[0], mask, &result);
        warp.registers.set_pred(inst.d[1], mask, valid);
    }
}

fn vote(warp: &mut Warp, inst: &Inst, mode: VoteMode, mask: u32) {
    let votes = warp.registers.get_pred(inst.s[0], inst.negated, 0) & mask;
    let ones = |condition: bool| if condition { !0 } else { 0 };
    match mode {
        VoteMode::All => warp.registers.set_pred(inst.d[0], mask, ones(votes == mask)),
        VoteMode::Any => warp.registers.set_pred(inst.d[0], mask, ones(votes != 0)),
        VoteMode::Uni => warp.registers.set_pred(inst.d[0], mask, ones(votes == 0 || votes == mask)),
        VoteMode::Ballot => warp.registers.set32(inst.d[0], mask, &[votes; 32]),
    }
}

fn match_lanes(warp: &mut Warp, inst: &Inst, mode: MatchMode, mask: u32) {
    let a = warp.registers.get_any(inst.s[0]);
    let equal = |lane: usize| {
        let mut set = 0u32;
        for_lanes(mask, |l| set |= u32::from(a[l] == a[lane]) << l);
        set
    };
    match mode {
        MatchMode::Any => warp.registers.set32(inst.d[0], mask, &std::array::from_fn(equal)),
        MatchMode::All => {
            let all = equal(mask.trailing_zeros() as usize) == mask;
            warp.registers.set32(inst.d[0], mask, &[if all { mask } else { 0 }; 32]);
            warp.registers.set_pred(inst.d[1], mask, if all { !0 } else { 0 });
        }
    }
}

fn reduce(warp: &mut Warp, inst: &Inst, op: ReduxOp, ty: Type, mask: u32) {
    debug_assert!(inst.s[0].class == Class::W32);
    let a = warp.registers.get32(inst.s[0]);
    let lanes = (0..32).filter(|l| mask >> l & 1 == 1).map(|l| a[l]);
    let fold = |f: fn(u32, u32) -> u32| lanes.reduce(f).unwrap_or(0);
    let signed = ty.is_signed();
    let result = match op {
        ReduxOp::Add => fold(u32::wrapping_add),
        ReduxOp::And => fold(|a, b| a & b),
        ReduxOp::Or => fold(|a, b| a | b),
        ReduxOp::Xor => fold(|a, b| a ^ b),
        ReduxOp::Min if signed => fold(|a, b| (a as i32).min(b as i32) as u32),
        ReduxOp::Max if signed => fold(|a, b| (a as i32).max(b as i32) as u32),
        ReduxOp::Min => fold(u32::min),
        ReduxOp::Max => fold(u32::max),
    };
    warp.registers.set32(inst.d[0], mask, &[result; 32]);
}
