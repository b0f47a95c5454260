//! The arrays of a call, and the call itself, whichever interface hands them over.

use std::panic::{AssertUnwindSafe, catch_unwind};

use flashcore::gpu::{Gpu, Operand};
use flashcore::raw::{self, Append, CallOptions, OperandMap, Queue, Ready, Rotary, SlotWrite, Tensor};
use flashcore::{AttentionError, Pass, Tensor as Role};

use crate::abi::{self, APPENDED, CallArray};
use crate::errors::invalid;

/// The arrays of a call.
#[derive(Debug, Default)]
pub struct CallArrays {
    operands: OperandMap<Tensor>,
    appended: [Option<Tensor>; APPENDED.len()],
    /// Address and number of the slots, and whether they have 64 bits.
    slots: Option<(u64, usize, bool)>,
}

impl CallArrays {
    /// Adds the slots, whose shape and strides are given.
    pub fn insert_slots(
        &mut self,
        address: u64,
        dtype: u32,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Result<(), AttentionError> {
        let name = CallArray::Slots.name();
        if !matches!(dtype, abi::I32 | abi::I64) {
            let expected = format!("{:#x} (i32) or {:#x} (i64)", abi::I32, abi::I64);
            return Err(invalid(name, "dtype", format!("{dtype:#x}"), expected));
        }
        let is_dense = |&count: &i64| count < 2 || strides.is_none_or(|strides| strides[0] == 1);
        let count = match shape {
            [count] if is_dense(count) => usize::try_from(*count).ok(),
            _ => None,
        };
        let count = count.ok_or_else(|| {
            let value = format!("{shape:?} with strides {strides:?}");
            invalid(name, "shape", value, "one dimension of dense elements")
        })?;
        let before = self.slots.replace((address, count, dtype == abi::I64));
        before.map_or(Ok(()), |_| Err(AttentionError::OperandTwice { operand: name }))
    }

    /// The write of new keys and values to slots. It has no other arrays than those that it takes.
    fn slot_write(&self) -> Result<SlotWrite, AttentionError> {
        let wanted = |operand, wanted| AttentionError::OperandWanted { operand, wanted };
        let appended = |index: usize| self.appended[index].ok_or(wanted(APPENDED[index], true));
        let of = |operand: Operand| self.operands.get(operand).copied();
        let cache = |operand: Operand| of(operand).ok_or(wanted(operand.name(), true));
        let descale = [Role::K, Role::V].map(Operand::Descale);
        let taken =
            |operand: &Operand| [Operand::K, Operand::V].contains(operand) || descale.contains(operand);
        if let Some((other, _)) = self.operands.iter().find(|(operand, _)| !taken(operand)) {
            return Err(wanted(other.name(), false));
        }
        if let Some(other) = (2..APPENDED.len()).find(|&index| self.appended[index].is_some()) {
            return Err(wanted(APPENDED[other], false));
        }
        let (slots, count, wide) = self.slots.ok_or(wanted(CallArray::Slots.name(), true))?;
        let factors = match descale.map(of) {
            [None, None] => None,
            _ => Some([cache(descale[0])?, cache(descale[1])?]),
        };
        let (keys, values) = (appended(0)?, appended(1)?);
        let (key_cache, value_cache) = (cache(Operand::K)?, cache(Operand::V)?);
        Ok(SlotWrite { keys, values, key_cache, value_cache, slots, count, wide, factors })
    }

    pub fn insert(&mut self, array: CallArray, tensor: Tensor) -> Result<(), AttentionError> {
        let before = match array {
            CallArray::Pass(operand) => self.operands.insert(operand, tensor),
            CallArray::Append(index) => self.appended[index].replace(tensor),
            CallArray::Slots => {
                return Err(AttentionError::OperandWanted { operand: array.name(), wanted: false });
            }
        };
        before.map_or(Ok(()), |_| Err(AttentionError::OperandTwice { operand: array.name() }))
    }

    pub fn has(&self, operand: Operand) -> bool {
        self.operands.get(operand).is_some()
    }

    /// The append of the call, if it has one.
    fn append(&self, interleaved: bool) -> Result<Option<Append>, AttentionError> {
        if !interleaved && self.appended.iter().all(Option::is_none) {
            return Ok(None);
        }
        let [_, _, starts, cos, sin, positions] = self.appended;
        let wanted = |index: usize| {
            self.appended[index]
                .ok_or(AttentionError::OperandWanted { operand: APPENDED[index], wanted: true })
        };
        let rotates = interleaved || [cos, sin, positions].iter().any(Option::is_some);
        let rotary = match rotates {
            true => Some(Rotary { cos: wanted(3)?, sin: wanted(4)?, interleaved, positions }),
            false => None,
        };
        Ok(Some(Append { keys: wanted(0)?, values: wanted(1)?, starts, rotary }))
    }
}

/// The pass of a call, whose outputs follow from the operands that it has.
pub fn pass(backward: bool, deterministic: bool, has: impl Fn(Operand) -> bool) -> Pass {
    if !backward {
        return Pass::forward(has(Operand::Lse));
    }
    let mut pass = if deterministic { Pass::DETERMINISTIC } else { Pass::BACKWARD };
    if let Pass::Backward { d_lse, wants, .. } = &mut pass {
        *d_lse = has(Operand::DLse);
        wants.sinks = has(Operand::DSinks);
        wants.tables = (0..8).filter(|&table| has(Operand::DTable(table))).fold(0, |bits, i| bits | 1 << i);
    }
    pass
}

/// Where a call runs.
#[derive(Clone, Copy, Debug)]
pub enum CallTarget {
    /// In host memory, on at most so many threads; 0: on all.
    Host(usize),
    /// On a stream of a GPU.
    Stream { ordinal: i32, handle: u64 },
}

/// A call.
#[derive(Debug)]
pub struct AttentionCall<'a> {
    pub place: CallTarget,
    pub arrays: CallArrays,
    pub options: &'a CallOptions,
    /// Whether the rotary embedding of the append has interleaved pairs.
    pub interleaved: bool,
    /// Whether new keys and values are written to slots, and no attention is computed.
    pub writes_slots: bool,
}

impl AttentionCall<'_> {
    /// Prepares the call and passes it on.
    pub fn with_ready(
        &self,
        then: impl FnOnce(&Ready<'_>) -> Result<(), AttentionError>,
    ) -> Result<(), AttentionError> {
        let gpu = match self.place {
            CallTarget::Host(_) => None,
            CallTarget::Stream { ordinal, .. } => Some(Gpu::open(ordinal)?),
        };
        let queue = match (self.place, &gpu) {
            (CallTarget::Stream { handle, .. }, Some(gpu)) => Queue::Stream { gpu, handle },
            (CallTarget::Host(threads @ 1..), _) => Queue::Host { executor: None, threads },
            _ => Queue::host(),
        };
        if self.writes_slots {
            return then(&raw::prepare_slots(queue, &self.arrays.slot_write()?)?);
        }
        if self.arrays.slots.is_some() {
            let operand = CallArray::Slots.name();
            return Err(AttentionError::OperandWanted { operand, wanted: false });
        }
        let append = self.arrays.append(self.interleaved)?;
        then(&raw::prepare_append(queue, &self.arrays.operands, self.options, append.as_ref())?)
    }
}

/// The code and the text of an error.
pub type Failure = (i32, String);

/// Runs a function of an interface. A panic becomes an error.
pub fn guarded(run: impl FnOnce() -> Result<(), AttentionError>) -> Result<(), Failure> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| (code_of(&error), error.to_string())),
        Err(_) => Err((abi::INTERNAL, "a defect of FlashCore: its message was printed to stderr".to_owned())),
    }
}

fn code_of(error: &AttentionError) -> i32 {
    match error {
        AttentionError::Driver(_) => abi::DEVICE,
        AttentionError::Unsupported { .. } | AttentionError::Kernel(_) => abi::UNSUPPORTED,
        _ => abi::INVALID,
    }
}
