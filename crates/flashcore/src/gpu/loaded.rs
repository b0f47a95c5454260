//! Kernels that are on the device. None is ever unloaded: a graph that someone captured may name it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Context, DriverError, Expect, Function};
use ptx::{Dim3, Kernel};

use super::scratch::Counters;
use crate::AttentionError;

/// A function that was admitted, and what it keeps between its launches.
#[derive(Debug)]
pub(super) struct Loaded {
    pub function: Function,
    pub counters: Option<Counters>,
}

/// What decides about loading and admission. Problems of many lengths give the same text and differ in what is passed to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    text: String,
    entry: String,
    expect: Expect,
    cluster: Dim3,
    /// Bytes of its counter.
    counter: Option<usize>,
}

/// The kernels of a device, each loaded once, and those that it does not admit.
#[derive(Debug, Default)]
pub(super) struct Kernels(Mutex<HashMap<Key, Result<Arc<Loaded>, DriverError>>>);

impl Kernels {
    /// The kernel on the device, loaded unless that is done already. `counter` is how many bytes it counts in.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        kernel: &Kernel,
        expect: &Expect,
        counter: Option<usize>,
    ) -> Result<Arc<Loaded>, AttentionError> {
        let (text, entry) = (kernel.module.to_string(), kernel.entry.clone());
        let key = Key { text, entry, expect: *expect, cluster: kernel.launch.cluster, counter };
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(known) = known {
            return Ok(known?);
        }
        let made = Function::load_text(context, &key.text, kernel, expect).and_then(|function| {
            let counters = counter.map(|bytes| Counters::new(context, bytes)).transpose()?;
            Ok(Arc::new(Loaded { function, counters }))
        });
        if made.as_ref().is_err_and(may_pass) {
            return Ok(made?);
        }
        // Two threads may both load; the first result stays.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.entry(key).or_insert(made).clone()?)
    }
}

/// Whether the same kernel may be taken another time.
fn may_pass(error: &DriverError) -> bool {
    !matches!(error, DriverError::Admission { .. } | DriverError::Compile { .. })
}
