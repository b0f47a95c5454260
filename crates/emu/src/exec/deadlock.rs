//! Nobody can go on: who waits for what.

use ptx::{Op, Space};

use super::Env;
use super::access::addresses;
use super::warp::{Split, State, Warp};
use crate::memory::resolve;
use crate::report::{HazardKind, ThreadId};

/// A thread that waits.
struct Waiter {
    line: u32,
    thread: ThreadId,
    what: String,
}

impl Env<'_> {
    /// Nobody can go on, or only in circles: says who waits for what.
    pub(super) fn report_deadlock(&mut self, warps: &[Warp]) {
        let mut waiters = Vec::new();
        for warp in warps {
            for split in &warp.splits {
                waiters.extend(self.waiter(warp, split));
                self.report_bytes(warp, split);
            }
        }
        let line = waiters.first().map_or(0, |w| w.line);
        let other = waiters.iter().find(|other| other.line != line);
        let threads = waiters.first().into_iter().chain(other).map(|w| w.thread).collect();
        let other_line = other.map(|w| w.line);
        let message = waiters.iter().map(|w| w.what.as_str()).collect::<Vec<_>>().join("; ");
        self.findings.report(HazardKind::Deadlock, line, other_line, || (threads, None, message));
    }

    fn waiter(&self, warp: &Warp, split: &Split) -> Option<Waiter> {
        let thread = self.thread(warp.index, split.mask.trailing_zeros() as usize);
        let name = match self.actors.ctas {
            1 => format!("warp {}", thread.warp),
            _ => format!("CTA {} warp {}", thread.cta, thread.warp),
        };
        let (line, what) = match split.state {
            State::Barrier(id) => {
                let line = self.line(split.pc);
                let (arrived, expected) = self.attendance(id);
                let id = id % 16;
                (
                    line,
                    format!(
                        "{name} waits at line {line} for barrier {id}, where {arrived} of {expected} threads have arrived"
                    ),
                )
            }
            State::Run => self.poller(warp, split, &name),
            State::Parked | State::Lanes(_) => return None,
        };
        Some(Waiter { line, thread, what })
    }

    /// Of lanes that try again and again.
    fn poller(&self, warp: &Warp, split: &Split, name: &str) -> (u32, String) {
        let code = &self.context.program.code;
        let here = code[split.pc as usize].line;
        match code[split.pc as usize].op {
            Op::BarrierCluster(_) => {
                return (here, format!("{name} waits at line {here} {}", self.describe_cluster_wait()));
            }
            Op::WgmmaWaitGroup => {
                let what = "for the other warps of its warpgroup to issue the same wgmma";
                return (here, format!("{name} waits at line {here} {what}"));
            }
            Op::Setmaxnreg(_) => {
                let what = self.describe_pool(warp, &code[split.pc as usize]);
                return (here, format!("{name} waits at line {here} {what}"));
            }
            _ => {}
        }
        // It gave up its turn right behind the read.
        let line = self.line(split.pc.saturating_sub(1));
        if let Some(address) = self.awaited(warp, split) {
            let place = self.place(Space::Shared, address);
            let state = self.mbarriers.describe(address);
            return (line, format!("{name} waits at line {line} for the mbarrier {place}, {state}"));
        }
        let what = "reads the same again and again, and nothing is left to change it";
        (line, format!("{name} (lanes {:#010x}) at line {line} {what}", split.mask))
    }

    /// The mbarrier that lanes wait for.
    fn awaited(&self, warp: &Warp, split: &Split) -> Option<u64> {
        let inst = &self.context.program.code[split.pc.checked_sub(1)? as usize];
        let lane = split.mask.trailing_zeros() as usize;
        let waits = split.state == State::Run && matches!(inst.op, Op::Mbarrier(m) if m.op.waits());
        waits.then(|| resolve(addresses(&warp.registers, inst)[lane]).1)
    }

    /// A phase whose arrivals have all come, but whose bytes never will.
    fn report_bytes(&mut self, warp: &Warp, split: &Split) {
        let Some(address) = self.awaited(warp, split) else { return };
        let Some((_, _, bytes)) = self.mbarriers.unbalanced().find(|(at, ..)| *at == address) else { return };
        let inst = &self.context.program.code[split.pc as usize - 1];
        let lane = split.mask.trailing_zeros() as usize;
        self.report(
            HazardKind::TransactionMismatch,
            inst,
            warp.index,
            lane,
            Some((Space::Shared, address)),
            || {
                if bytes > 0 {
                    format!("waits for {bytes} bytes that the mbarrier was told to expect and no copy brings")
                } else {
                    format!(
                        "waits for an mbarrier to which {} bytes more have come than it was told to expect",
                        -bytes
                    )
                }
            },
        );
    }
}
