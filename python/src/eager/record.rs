//! Eager calls that autograd records.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{Pending, Rows, flag};
use crate::call::code_of;
use crate::device;
use crate::error::Error;
use crate::torch::{CUDA, asks, quiet};

/// The inputs and terms of a call that its backward pass needs besides q, k, v and the results.
#[derive(Default)]
pub(super) struct Kept<'py> {
    /// `None` for a call without lengths.
    pub lengths: Option<[Bound<'py, PyAny>; 5]>,
    /// With whether its gradient is needed.
    pub sink: Option<(Bound<'py, PyAny>, bool)>,
    pub table: Option<KeptTable<'py>>,
    /// The texts of the programs.
    pub score: String,
    pub mask: String,
    /// The probability of dropout, and the state of its generator.
    pub dropout: f64,
    pub state: Option<Bound<'py, PyAny>>,
    /// Whether the gradients must have equal bits in each run.
    pub deterministic: bool,
}

/// The table that a call's program reads: ALiBi slopes, or a mask.
pub(super) struct KeptTable<'py> {
    pub name: &'static str,
    pub tensor: Bound<'py, PyAny>,
    /// The code of its type, and the number of its dimensions.
    pub kind: (u8, usize),
    /// Whether its gradient is needed.
    pub wanted: bool,
}

impl<'py> Pending<'_, 'py> {
    /// States whether the gradients must have equal bits in each run. Python code judges other values.
    pub(super) fn deterministic(&mut self, asked: &Bound<'py, PyAny>) -> Option<()> {
        if self.records {
            self.kept.deterministic = flag(asked)?;
        }
        Some(())
    }

    /// Whether the device computes the gradients of the call.
    pub(super) fn has_gradients(&self) -> Option<()> {
        let Kept { sink, table, score, mask, deterministic, .. } = &self.kept;
        let on_gpu = self.device.0 == CUDA;
        if !on_gpu && score.is_empty() && mask.is_empty() {
            return Some(());
        }
        // Head dims decide nothing on the CPU.
        let dims = if on_gpu { (self.rows[3], self.dim_v) } else { (8, 8) };
        let tables = table.iter().map(|table| table.kind).collect();
        let sinks = (sink.is_some(), sink.as_ref().is_some_and(|(_, wanted)| *wanted));
        let of_tables = u8::from(table.as_ref().is_some_and(|table| table.wanted));
        let (programs, numbers) = ((score.clone(), mask.clone()), (0, self.call.options.ints.len()));
        let deterministic = *deterministic || asks(self.py, &self.torch.functions.deterministic)?;
        let call = (dims, code_of(self.dtype)?, programs, numbers, tables, sinks, of_tables, deterministic);
        let ordinal = on_gpu.then_some(self.device.1);
        quiet(device::lacks_gradients(self.py, ordinal, call).ok()?.is_some())
    }

    /// Has autograd record the call with its results, and returns the results as autograd knows them.
    pub(super) fn record(
        &self,
        [q, k, v]: [&Bound<'py, PyAny>; 3],
        made: (Bound<'py, PyAny>, Bound<'py, PyAny>),
    ) -> Result<Bound<'py, PyAny>, Error> {
        let (py, kept) = (self.py, &self.kept);
        let none = || py.None().into_bound(py);
        let heads = if self.order == Rows::Bhsd { 1 } else { 2 };
        let (mut features, mut others) = (none(), PyTuple::empty(py));
        let deterministic = kept.deterministic;
        let programs = !kept.score.is_empty() || !kept.mask.is_empty();
        let stated = kept.lengths.is_some() || programs || kept.sink.is_some() || kept.state.is_some();
        if stated || deterministic {
            let ints = PyTuple::new(py, &self.call.options.ints)?;
            let name = kept.table.as_ref().map_or("", |table| table.name);
            let stated = (self.sizes(), (&kept.score, &kept.mask, ints), name, deterministic, kept.dropout);
            features = self.torch.functions.features.bind(py).call1(stated)?;
            let lengths = kept.lengths.clone().unwrap_or_else(|| [(); 5].map(|()| none()));
            let state = kept.state.clone().unwrap_or_else(none);
            others = PyTuple::new(py, lengths.iter().chain([&state]).collect::<Vec<_>>())?;
        }
        let sink = kept.sink.as_ref().map_or_else(none, |(sink, _)| sink.clone());
        let call = (heads, self.terms, features, others, made);
        let record = self.torch.functions.record.bind(py);
        Ok(match &kept.table {
            Some(table) => record.call1((q, k, v, sink, call, &table.tensor))?,
            None => record.call1((q, k, v, sink, call))?,
        })
    }

    /// Batch entries, and the longest sequences of queries and of keys; 0 without lengths.
    fn sizes(&self) -> [usize; 3] {
        let Some(lengths) = &self.kept.lengths else { return [0; 3] };
        let entries = lengths[0].len().map_or(self.rows[0], |starts| starts - 1);
        let longest = self.call.options.longest;
        [entries, longest[0].unwrap_or(self.rows[2]), longest[1].unwrap_or(self.keys)]
    }
}
