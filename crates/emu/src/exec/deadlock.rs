//! Reports deadlocks: what each warp waits for, and a cycle of waits.

use ptx::Space;

use super::Env;
use super::wait_for::{Awaited, Waiter, cycle};
use super::warp::{Split, Warp};
use crate::report::{HazardKind, ThreadId};

impl Env<'_> {
    /// Reports a deadlock or a livelock: what each warp waits for, and which warps could end the wait.
    pub(super) fn report_deadlock(&mut self, warps: &[Warp]) {
        let waiters = self.waiters(warps);
        let helpers = self.helpers(&waiters);
        let mut told: Vec<(String, Vec<usize>)> = Vec::new();
        let mut places: Vec<(u32, ThreadId)> = Vec::new();
        for (waiter, helpers) in waiters.iter().zip(&helpers) {
            if waiter.awaited == Awaited::Lanes {
                continue;
            }
            let mut what = format!("at line {} {}", self.line_of(waiter), self.describe_wait(waiter));
            if helpers.is_empty() {
                what += &self.describe_absent(waiter, warps);
            }
            let place = (self.line_of(waiter), self.thread_in(waiter));
            places.push(place);
            match told.iter_mut().find(|(known, first)| *known == what && self.same_cta(first[0], waiter)) {
                Some((_, names)) => names.push(waiter.warp.index),
                None => told.push((what, vec![waiter.warp.index])),
            }
        }
        let told = told.into_iter().map(|(what, mut names)| {
            names.dedup();
            let verb = if names.len() == 1 { "waits" } else { "wait" };
            format!("{} {verb} {what}", self.names(&names))
        });
        let circle = cycle(&helpers).map(|circle| self.describe_cycle(&waiters, &circle));
        let message = told.chain(circle).collect::<Vec<_>>().join("; ");
        for waiter in &waiters {
            self.report_bytes(waiter.warp, waiter.split);
        }
        let line = places.first().map_or(0, |place| place.0);
        let other = places.iter().find(|place| place.0 != line);
        let threads = places.first().into_iter().chain(other).map(|place| place.1).collect();
        let other_line = other.map(|place| place.0);
        self.log.findings.report(HazardKind::Deadlock, line, other_line, || (threads, None, message));
    }

    fn same_cta(&self, warp: usize, waiter: &Waiter) -> bool {
        warp / self.facts.actors.warps == self.rank(waiter.warp)
    }

    fn thread_in(&self, waiter: &Waiter) -> ThreadId {
        self.thread(waiter.warp.index, waiter.split.mask.trailing_zeros() as usize)
    }

    fn line_of(&self, waiter: &Waiter) -> u32 {
        let polls = matches!(waiter.awaited, Awaited::Mbarrier(_) | Awaited::Memory);
        self.line(waiter.split.pc - u32::from(polls && waiter.split.pc > 0))
    }

    /// A list of warps of one CTA as text.
    fn names(&self, warps: &[usize]) -> String {
        let number = |warp: &usize| (warp % self.facts.actors.warps).to_string();
        let listed = match warps {
            [] => String::new(),
            [one] => format!("warp {}", number(one)),
            [first @ .., last] => {
                let first = first.iter().map(number).collect::<Vec<_>>().join(", ");
                format!("warps {first} and {}", number(last))
            }
        };
        match (self.facts.actors.ctas, warps.first()) {
            (2.., Some(warp)) => format!("CTA {} {listed}", self.facts.ctas[warp / self.facts.actors.warps]),
            _ => listed,
        }
    }

    fn describe_wait(&self, waiter: &Waiter) -> String {
        let inst = &self.facts.context.program.code[waiter.split.pc as usize];
        match waiter.awaited {
            Awaited::Barrier(at) => {
                let (arrived, expected) = self.barriers.attendance(at);
                format!("for barrier {}, where {arrived} of {expected} threads have arrived", at % 16)
            }
            Awaited::Mbarrier(address) => {
                let (place, state) =
                    (self.facts.place(Space::Shared, address), self.mbarriers.describe(address));
                format!("for the mbarrier {place}, {state}")
            }
            Awaited::Cluster => self.rendezvous.describe(self.live_threads()),
            Awaited::Products => "for the other warps of its warpgroup to issue the same wgmma".into(),
            Awaited::Registers => self.describe_pool(waiter.warp, inst),
            Awaited::Columns => "for columns of tensor memory, which other allocations have".into(),
            Awaited::Memory => {
                format!("for a change of the memory that lanes {:#010x} poll", waiter.split.mask)
            }
            Awaited::Lanes => "for its other lanes".into(),
        }
    }

    /// Describes a wait that no waiting warp can end, because all warps that could have ended it have exited.
    fn describe_absent(&self, waiter: &Waiter, warps: &[Warp]) -> String {
        let own = self.facts.warpgroup_of(waiter.warp.index);
        let missed = |warp: &&Warp| match waiter.awaited {
            // A barrier of the whole CTA does not wait for exited warps, and neither does the cluster
            // barrier.
            Awaited::Barrier(at) => {
                self.barriers.is_counted(at)
                    && self.same_cta(warp.index, waiter)
                    && !self.barriers.has_arrived(at, warp.index)
            }
            Awaited::Products => own.contains(&warp.index),
            Awaited::Mbarrier(_) | Awaited::Registers | Awaited::Columns => self.same_cta(warp.index, waiter),
            Awaited::Cluster | Awaited::Memory | Awaited::Lanes => false,
        };
        let gone: Vec<usize> =
            warps.iter().filter(|w| w.splits.is_empty()).filter(missed).map(|w| w.index).collect();
        let nobody = match waiter.awaited {
            Awaited::Memory => "no running thread can change it",
            Awaited::Registers => "no running warp can release registers",
            Awaited::Columns => "no running warp can free columns",
            _ => "no running warp can end the wait",
        };
        match &gone[..] {
            [] => format!(", and {nobody}"),
            [_] => format!(", and {nobody}: {} has exited", self.names(&gone)),
            _ => format!(", and {nobody}: {} have exited", self.names(&gone)),
        }
    }

    /// The cycle as text, for example `warp 0 (line 12, barrier 2) → warp 1 (line 9, barrier 1) → warp 0`.
    fn describe_cycle(&self, waiters: &[Waiter], circle: &[usize]) -> String {
        let step = |&at: &usize| {
            let waiter = &waiters[at];
            let awaited = match waiter.awaited {
                Awaited::Barrier(at) => format!("barrier {}", at % 16),
                Awaited::Mbarrier(address) => {
                    format!("mbarrier {}", self.facts.place(Space::Shared, address))
                }
                Awaited::Cluster => "the cluster barrier".into(),
                Awaited::Products => "products".into(),
                Awaited::Registers => "registers".into(),
                Awaited::Columns => "columns of tensor memory".into(),
                Awaited::Memory => "memory".into(),
                Awaited::Lanes => "other lanes".into(),
            };
            format!("{} (line {}, {awaited})", self.names(&[waiter.warp.index]), self.line_of(waiter))
        };
        let first = self.names(&[waiters[circle[0]].warp.index]);
        let steps: Vec<String> = circle.iter().map(step).chain([first]).collect();
        format!("the cycle: {}", steps.join(" → "))
    }

    /// Reports a phase whose arrivals are complete but whose announced bytes will never all arrive.
    fn report_bytes(&mut self, warp: &Warp, split: &Split) {
        let Some(address) = self.polled(warp, split) else { return };
        let Some((_, _, bytes)) = self.mbarriers.unbalanced().find(|(at, ..)| *at == address) else { return };
        let inst = &self.facts.context.program.code[split.pc as usize - 1];
        let lane = split.mask.trailing_zeros() as usize;
        self.report(
            HazardKind::TransactionMismatch,
            inst,
            warp.index,
            lane,
            Some((Space::Shared, address)),
            || {
                if bytes > 0 {
                    format!("waits for {bytes} bytes that the mbarrier expects and no copy delivers")
                } else {
                    format!("waits for an mbarrier at which {} more bytes arrived than it expected", -bytes)
                }
            },
        );
    }
}
