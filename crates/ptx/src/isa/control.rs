//! Control flow and instructions about the CTA or the grid (PTX ISA, "Control Flow Instructions",
//! "Miscellaneous Instructions", "griddepcontrol").

use smallvec::smallvec;

use super::requirement::{need, need_specific};
use super::signature::{read, value, write};
use super::syntax::names;
use crate::verify::rules::{constant, multiple, range};
use crate::{Signature, SlotKind, Type};

/// `setmaxnreg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum RegisterChange {
    Inc,
    Dec,
}

/// `griddepcontrol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum GridDependency {
    LaunchDependents,
    Wait,
}

names! {
    RegisterChange { Inc = "inc", Dec = "dec" }
    GridDependency { LaunchDependents = "launch_dependents", Wait = "wait" }
}

instructions! { ($) control control_list

    /// `label`. PTX ISA, "bra".
    Bra {
        /// `.uni`.
        uni: bool,
    } => {
        text: |m| { m.head("bra")?; m.flag(uni, "uni") },
        operands: smallvec![read(SlotKind::Label)],
    }

    /// `index, labels`. PTX ISA, "brx.idx".
    BrxIdx {
        /// `.uni`.
        uni: bool,
    } => {
        text: |m| { m.head("brx.idx")?; m.flag(uni, "uni") },
        operands: smallvec![read(value(Type::U32)), read(SlotKind::Labels)],
    }

    /// `(results)?, function, (arguments)?`: a `List`, a `Function`, a `List`; missing lists are empty
    /// `List`s. PTX ISA, "call".
    Call {
        /// `.uni`.
        uni: bool,
    } => {
        text: |m| { m.head("call")?; m.flag(uni, "uni") },
        operands: smallvec![write(SlotKind::List), read(SlotKind::Callee), read(SlotKind::List)],
    }

    /// No operands. PTX ISA, "ret".
    Ret {
        /// `.uni`.
        uni: bool,
    } => {
        text: |m| { m.head("ret")?; m.flag(uni, "uni") },
        operands: Signature::new(),
    }

    /// No operands. PTX ISA, "exit".
    Exit => {
        text: |m| m.head("exit"),
        operands: Signature::new(),
    }

    /// No operands. PTX ISA, "trap".
    Trap => {
        text: |m| m.head("trap"),
        operands: Signature::new(),
    }

    /// No operands. PTX ISA, "brkpt".
    Brkpt => {
        text: |m| m.head("brkpt"),
        operands: Signature::new(),
    }

    /// `t`: a time in nanoseconds. PTX ISA, "nanosleep".
    Nanosleep => {
        text: |m| { m.head("nanosleep")?; m.word("u32") },
        operands: smallvec![read(value(Type::U32))],
    }

    /// `a`: the index of the event, 0 to 15. PTX ISA, "pmevent".
    Pmevent => {
        text: |m| m.head("pmevent"),
        operands: smallvec![read(SlotKind::Constant)],
        check: |inst| range("the event of pmevent", constant(inst, 0), 0, 15),
    }

    /// `n`: registers per thread, a multiple of 8 from 24 to 256. PTX ISA, "setmaxnreg".
    Setmaxnreg(change: RegisterChange) => {
        text: |m| {
            m.head("setmaxnreg")?;
            m.one(change, "`.inc` or `.dec`", RegisterChange::NAMES)?;
            m.aligned()?;
            m.word("u32")
        },
        operands: smallvec![read(SlotKind::Constant)],
        needs: need_specific(80, 90),
        check: |inst| {
            range("the registers of setmaxnreg", constant(inst, 0), 24, 256)?;
            multiple("the registers of setmaxnreg", constant(inst, 0), 8)
        },
    }

    /// No operands: programmatic dependent launch. PTX ISA, "griddepcontrol".
    Griddepcontrol(action: GridDependency) => {
        text: |m| {
            m.head("griddepcontrol")?;
            m.one(action, "`.launch_dependents` or `.wait`", GridDependency::NAMES)
        },
        operands: Signature::new(),
        needs: need(78, 90),
    }
}
