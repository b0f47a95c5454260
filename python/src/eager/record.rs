//! Eager calls that autograd records.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{Pending, Rows, flag};
use crate::call::code_of;
use crate::device;
use crate::error::Error;
use crate::torch::{CUDA, quiet};

/// The inputs and terms of a call that its backward pass needs besides q, k, v and the results.
#[derive(Default)]
pub(super) struct Kept<'py> {
    /// `None` for a call without lengths.
    pub lengths: Option<[Bound<'py, PyAny>; 5]>,
    /// With whether its gradient is needed.
    pub sink: Option<(Bound<'py, PyAny>, bool)>,
    /// With the code of their type, the number of their dimensions, and whether their gradient is needed.
    pub slopes: Option<(Bound<'py, PyAny>, (u8, usize), bool)>,
    /// The texts of the programs.
    pub score: String,
    pub mask: &'static str,
    /// Whether the gradients must have equal bits in each run.
    pub deterministic: bool,
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
        let Kept { sink, slopes, score, mask, .. } = &self.kept;
        let on_gpu = self.device.0 == CUDA;
        if !on_gpu && score.is_empty() && mask.is_empty() {
            return Some(());
        }
        // Head dims decide nothing on the CPU.
        let dims = if on_gpu { (self.rows[3], self.dim_v) } else { (8, 8) };
        let tables = slopes.iter().map(|(_, kind, _)| *kind).collect();
        let sinks = (sink.is_some(), sink.as_ref().is_some_and(|(_, wanted)| *wanted));
        let of_tables = u8::from(slopes.as_ref().is_some_and(|(.., wanted)| *wanted));
        let (programs, numbers) = ((score.clone(), (*mask).to_owned()), (0, self.call.options.ints.len()));
        let call = (dims, code_of(self.dtype)?, programs, numbers, tables, sinks, of_tables);
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
        let (with_slopes, with_sink) = (kept.slopes.is_some(), kept.sink.is_some());
        if kept.lengths.is_some() || with_slopes || with_sink || !kept.mask.is_empty() || deterministic {
            let ints = PyTuple::new(py, &self.call.options.ints)?;
            let programs = (&kept.score, kept.mask, ints);
            let stated = (self.sizes(), programs, with_slopes, deterministic);
            features = self.torch.functions.features.bind(py).call1(stated)?;
            let lengths = kept.lengths.clone().unwrap_or_else(|| [(); 5].map(|()| none()));
            others = PyTuple::new(py, lengths.iter().chain([&none()]).collect::<Vec<_>>())?;
        }
        let sink = kept.sink.as_ref().map_or_else(none, |(sink, _)| sink.clone());
        let call = (heads, self.terms, features, others, made);
        let record = self.torch.functions.record.bind(py);
        Ok(match &kept.slopes {
            Some((slopes, ..)) => record.call1((q, k, v, sink, call, slopes))?,
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
