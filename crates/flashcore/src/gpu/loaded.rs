//! Kernels that are on the device. None is ever unloaded: a graph that someone captured may name it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Context, DriverError, Expect, Function, Printed};
use ptx::{Dim3, Kernel};

use super::scratch::{OwnMemory, Purpose, Scratch};
use crate::AttentionError;

/// A function that was admitted, and its own memory.
#[derive(Debug)]
pub(super) struct Loaded {
    pub function: Function,
    /// In the order of the kernel's buffers.
    pub own: Vec<Arc<OwnMemory>>,
}

/// What decides about loading and admission. Problems of many lengths give the same text and differ in what is passed to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    text: String,
    entry: String,
    expect: Expect,
    cluster: Dim3,
    /// What it has memory for, and bytes of that.
    own: Vec<(Purpose, usize)>,
}

/// The kernels of a device, each loaded once, and those that it does not admit.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    all: Mutex<HashMap<Key, Result<Arc<Loaded>, DriverError>>>,
    pub scratch: Scratch,
}

impl Kernels {
    /// The kernel on the device, loaded unless that is done already. `own` is what it has memory for, and bytes of that.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        kernel: &Kernel,
        expect: &Expect,
        own: Vec<(Purpose, usize)>,
    ) -> Result<Arc<Loaded>, AttentionError> {
        let printed = Printed::new(kernel);
        let (text, entry) = (printed.text().to_owned(), kernel.entry.clone());
        let key = Key { text, entry, expect: *expect, cluster: kernel.launch.cluster, own };
        let known = self.all.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(known) = known {
            return Ok(known?);
        }
        let made = Function::load_printed(context, &printed, expect).and_then(|function| {
            let own = key.own.iter().map(|&(purpose, bytes)| self.scratch.of_size(context, purpose, bytes));
            Ok(Arc::new(Loaded { function, own: own.collect::<Result<_, _>>()? }))
        });
        if made.as_ref().is_err_and(may_pass) {
            return Ok(made?);
        }
        // Two threads may both load; the first result stays.
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.entry(key).or_insert(made).clone()?)
    }
}

/// Whether the same kernel may be taken another time.
fn may_pass(error: &DriverError) -> bool {
    !matches!(error, DriverError::Admission { .. } | DriverError::Compile { .. })
}
