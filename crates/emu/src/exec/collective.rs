//! Executes instructions in which lanes of a warp take part together: `bar.warp.sync`, `shfl`, `vote`,
//! `match`, `redux`, `elect`.

use ptx::{BinaryOp, FloatMods, MatchMode, Op, ReduxOp, ShflMode, Type, VoteMode};
use smallvec::SmallVec;

use super::Env;
use super::barrier::named;
use super::registers::for_lanes;
use super::run::{Flow, Part};
use super::warp::{Split, State, Warp};
use crate::decode::{Inst, NOWHERE, Slot};
use crate::report::{HazardKind, Options, Schedule};
use crate::semantics::scalar::evaluate;

fn is_collective(op: &Op) -> bool {
    matches!(op, Op::BarWarpSync | Op::Shfl(_) | Op::Vote(_) | Op::Match(..) | Op::Redux { .. } | Op::Elect)
}

impl Env<'_> {
    pub(super) fn collective(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, lanes: u32) -> Flow {
        let members = match inst.op {
            Op::BarWarpSync | Op::Elect => inst.s[0],
            Op::Shfl(_) => inst.s[3],
            _ => inst.s[1],
        };
        if let Some(flow) = self.gather(warp, split, inst, members) {
            return flow;
        }
        let forced = std::mem::take(&mut split.forced);
        if !(forced && inst.op == Op::BarWarpSync) {
            self.exchange(warp, &[Part { inst, lanes }]);
        }
        Flow::Next
    }

    /// Executes a collective for lanes that wait for each other at different instructions. PTX ISA,
    /// "shfl.sync" (and similarly for the others), requires that all threads of the member mask execute an
    /// instruction "with the same qualifiers and same membermask value", which may be different instructions.
    /// Lanes may also arrive at a `barrier` without `.aligned` through different instructions.
    pub(super) fn meet_apart(&mut self, warp: &mut Warp) {
        for first in 0..warp.splits.len() {
            let Some(met) = self.met_apart(warp, first) else { continue };
            let code = &self.facts.context.program.code;
            let part = |i: &usize| {
                let split = &warp.splits[*i];
                Part { inst: &code[split.pc as usize], lanes: split.mask }
            };
            let parts: Vec<Part> = met.iter().map(part).collect();
            let flow = match parts[0].inst.op {
                Op::Bar { .. } => self.meet_barrier(warp, &parts),
                _ => {
                    self.exchange(warp, &parts);
                    Flow::Next
                }
            };
            for (i, part) in met.into_iter().zip(parts) {
                self.count(warp, warp.splits[i].pc as usize, part.inst, part.lanes);
                let split = &mut warp.splits[i];
                (split.polls, split.ran_on) = (0, NOWHERE);
                match flow {
                    Flow::Hold(state) => split.state = state,
                    _ => (split.state, split.pc) = (State::Run, split.pc + 1),
                }
            }
        }
    }

    /// The splits that wait for the same collective as `first`, if together they are complete.
    fn met_apart(&self, warp: &Warp, first: usize) -> Option<SmallVec<[usize; 4]>> {
        let code = &self.facts.context.program.code;
        let split = &warp.splits[first];
        let State::Lanes(members) = split.state else { return None };
        let inst = &code[split.pc as usize];
        let barrier = |s: &Split, inst: &Inst| named(warp, inst, s.mask.trailing_zeros() as usize);
        let here = |s: &Split| {
            let there = &code[s.pc as usize];
            s.state == split.state
                && there.op == inst.op
                && match inst.op {
                    Op::Bar { aligned, .. } => !aligned && barrier(s, there) == barrier(split, inst),
                    op => is_collective(&op),
                }
        };
        let met: SmallVec<[usize; 4]> = (0..warp.splits.len()).filter(|i| here(&warp.splits[*i])).collect();
        let lanes = met.iter().fold(0, |m, i| m | warp.splits[*i].mask);
        (members & warp.live & !lanes == 0 && !met.is_empty()).then_some(met)
    }

    /// Executes the collective for lanes that execute it together.
    fn exchange(&mut self, warp: &mut Warp, parts: &[Part]) {
        let lanes = parts.iter().fold(0, |all, part| all | part.lanes);
        let op = parts[0].inst.op;
        if op == Op::BarWarpSync || self.facts.context.options.collectives_order {
            warp.view.meet(lanes, warp.live);
            let carried = warp.fences.sequential(&warp.view, lanes);
            warp.fences.inherit(&warp.view, lanes, &carried);
        }
        if matches!(op, Op::Vote(_) | Op::Match(..) | Op::Redux { .. }) {
            self.follow_exchange(warp, parts, |from| if from == 0 { 0 } else { !0 });
        }
        match op {
            Op::Shfl(mode) => self.shuffle(warp, mode, parts, lanes),
            Op::Vote(mode) => vote(warp, mode, parts, lanes),
            Op::Match(mode, _) => match_lanes(warp, mode, parts, lanes),
            Op::Redux { op: ReduxOp::Min, ty: Type::F32, abs, nan } => {
                reduce_floats(warp, BinaryOp::Min, (abs, nan), parts, lanes);
            }
            Op::Redux { op: ReduxOp::Max, ty: Type::F32, abs, nan } => {
                reduce_floats(warp, BinaryOp::Max, (abs, nan), parts, lanes);
            }
            Op::Redux { op, ty, .. } => reduce(warp, op, ty, parts, lanes),
            Op::Elect => {
                let leader = self.leader(lanes);
                set32(warp, parts, &[leader; 32]);
                set_pred(warp, parts, 1, 1 << leader);
            }
            _ => {}
        }
    }

    /// The lane that `elect.sync` chooses. Any lane is allowed, but the choice must be the same for the same
    /// lanes (PTX ISA, "elect.sync"). With [`Schedule::Late`] it is the lowest lane, as on current GPUs.
    fn leader(&self, lanes: u32) -> u32 {
        let Options { schedule, seed, .. } = self.facts.context.options;
        if *schedule == Schedule::Late {
            return lanes.trailing_zeros();
        }
        let hash = (u64::from(lanes) ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let nth = hash as u32 % lanes.count_ones().max(1);
        let rest = (0..nth).fold(lanes, |rest, _| rest & rest.wrapping_sub(1));
        rest.trailing_zeros()
    }

    /// Returns `None` when all lanes of the member mask have arrived. Otherwise returns how the split
    /// continues.
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
                format!("the lane's member mask {members:#010x} does not include the lane itself")
            });
            return None;
        }
        let missing = members & warp.live & !split.mask;
        (missing != 0 && !split.forced).then_some(Flow::Wait(State::Lanes(members)))
    }

    /// PTX ISA, "shfl.sync": `c` holds the clamp in bits 0–4 and the segment mask in bits 8–12.
    fn shuffle(&mut self, warp: &mut Warp, mode: ShflMode, parts: &[Part], lanes: u32) {
        let [a, b, c] = [0, 1, 2].map(|i| get32(warp, parts, i));
        let mut result = a;
        let mut valid = 0u32;
        let mut sources = [0; 32];
        for_lanes(lanes, |lane| {
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
            result[lane] = a[source];
        });
        self.check_sources(warp, parts, lanes, &sources);
        set32(warp, parts, &result);
        set_pred(warp, parts, 1, valid);
    }

    /// Checks that the source lane of each shuffle participates, and follows its value if it is undefined.
    fn check_sources(&mut self, warp: &mut Warp, parts: &[Part], lanes: u32, sources: &[usize; 32]) {
        for part in parts {
            let mut absent = 0u32;
            for_lanes(part.lanes, |lane| absent |= u32::from(lanes >> sources[lane] & 1 == 0) << lane);
            if absent != 0 {
                let lane = absent.trailing_zeros() as usize;
                self.report(HazardKind::UninitialisedRead, part.inst, warp.index, lane, None, || {
                    "the lane shuffles from a lane that does not participate: the value is undefined".into()
                });
            }
        }
        self.follow_exchange(warp, parts, |from| {
            (0..32).fold(0, |set, l| set | (from >> sources[l] & 1) << l)
        });
    }

    /// Follows undefined values through an exchange: `reached` gives the lanes whose results depend on those
    /// of a set of lanes.
    fn follow_exchange(&self, warp: &mut Warp, parts: &[Part], reached: impl Fn(u32) -> u32) {
        let watches = &self.facts.context.program.watches;
        let watched = |part: &Part| {
            let watch = part.inst.watched.map(|watch| &watches[watch as usize]);
            (watch, part.inst.line, part.lanes)
        };
        if parts.iter().any(|part| part.inst.watched.is_some()) {
            warp.undefined.exchanged(&parts.iter().map(watched).collect::<Vec<_>>(), reached);
        }
    }
}

/// The values of source operand `index`. Each lane's value comes from its own instruction.
fn get32(warp: &Warp, parts: &[Part], index: usize) -> [u32; 32] {
    let mut values = *warp.registers.get32(parts[0].inst.s[index]);
    for part in &parts[1..] {
        let own = warp.registers.get32(part.inst.s[index]);
        for_lanes(part.lanes, |lane| values[lane] = own[lane]);
    }
    values
}

fn set32(warp: &mut Warp, parts: &[Part], values: &[u32; 32]) {
    parts.iter().for_each(|part| warp.registers.set32(part.inst.d[0], part.lanes, values));
}

fn set_pred(warp: &mut Warp, parts: &[Part], index: usize, values: u32) {
    parts.iter().for_each(|part| warp.registers.set_pred(part.inst.d[index], part.lanes, values));
}

fn vote(warp: &mut Warp, mode: VoteMode, parts: &[Part], lanes: u32) {
    let own = |part: &Part| warp.registers.get_pred(part.inst.s[0], part.inst.negated, 0) & part.lanes;
    let votes = parts.iter().fold(0, |all, part| all | own(part));
    let ones = |condition: bool| if condition { !0 } else { 0 };
    match mode {
        VoteMode::All => set_pred(warp, parts, 0, ones(votes == lanes)),
        VoteMode::Any => set_pred(warp, parts, 0, ones(votes != 0)),
        VoteMode::Uni => set_pred(warp, parts, 0, ones(votes == 0 || votes == lanes)),
        VoteMode::Ballot => set32(warp, parts, &[votes; 32]),
    }
}

fn match_lanes(warp: &mut Warp, mode: MatchMode, parts: &[Part], lanes: u32) {
    let mut a = [0; 32];
    for part in parts {
        let own = warp.registers.get_any(part.inst.s[0]);
        for_lanes(part.lanes, |lane| a[lane] = own[lane]);
    }
    let equal = |lane: usize| {
        let mut set = 0u32;
        for_lanes(lanes, |l| set |= u32::from(a[l] == a[lane]) << l);
        set
    };
    match mode {
        MatchMode::Any => set32(warp, parts, &std::array::from_fn(equal)),
        MatchMode::All => {
            let all = equal(lanes.trailing_zeros() as usize) == lanes;
            set32(warp, parts, &[if all { lanes } else { 0 }; 32]);
            set_pred(warp, parts, 1, if all { !0 } else { 0 });
        }
    }
}

fn reduce(warp: &mut Warp, op: ReduxOp, ty: Type, parts: &[Part], lanes: u32) {
    let a = get32(warp, parts, 0);
    let values = (0..32).filter(|l| lanes >> l & 1 == 1).map(|l| a[l]);
    let fold = |f: fn(u32, u32) -> u32| values.reduce(f).unwrap_or(0);
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
    set32(warp, parts, &[result; 32]);
}

/// The minimum or maximum, as `min` and `max` of two values compute it.
fn reduce_floats(warp: &mut Warp, op: BinaryOp, (abs, nan): (bool, bool), parts: &[Part], lanes: u32) {
    let op = Op::Binary(op, Type::F32, FloatMods { nan, ..FloatMods::NONE });
    let both = |a, b| evaluate(&op, [a, b, 0, 0]).unwrap_or(0);
    let kept = if abs { !(1 << 31) } else { !0 };
    let values = get32(warp, parts, 0).map(|bits| u64::from(bits & kept));
    // The first value is combined with itself, so that a NaN alone gives the canonical NaN.
    let first = values[lanes.trailing_zeros() as usize];
    let result = (0..32).filter(|l| lanes >> l & 1 == 1).fold(first, |found, l| both(found, values[l]));
    set32(warp, parts, &[result as u32; 32]);
}
