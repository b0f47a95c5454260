//! Kernels loaded on the device. No kernel is ever unloaded: a captured graph may refer to it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Context, DriverError, Expect, Function, Printed};
use ptx::{Dim3, Kernel};

use super::scratch::{OwnMemory, Purpose, Scratch};
use crate::AttentionError;

/// A function that passed admission, with its counter and scratch memory.
#[derive(Debug)]
pub(super) struct Loaded {
    pub function: Function,
    /// In the order of the kernel's buffers after the caller's.
    pub own: Vec<Arc<OwnMemory>>,
}

/// What loading and admission depend on. Problems of different lengths often give the same text and differ
/// only in the launch arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    text: String,
    entry: String,
    expect: Expect,
    cluster: Dim3,
    /// Purpose and size in bytes of each counter and scratch buffer.
    own: Vec<(Purpose, usize)>,
}

/// The loaded kernels of a device, and the kernels whose loading failed for good.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    all: Mutex<HashMap<Key, Result<Arc<Loaded>, DriverError>>>,
    pub scratch: Scratch,
}

impl Kernels {
    /// The loaded kernel; loads it on the first call. `own` lists purpose and size in bytes of its counter
    /// and scratch buffers.
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
        // Two threads may load the same kernel at once; the first result stays.
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.entry(key).or_insert(made).clone()?)
    }
}

/// Whether loading the same kernel again may succeed.
fn may_pass(error: &DriverError) -> bool {
    !matches!(error, DriverError::Admission { .. } | DriverError::Compile { .. })
}
