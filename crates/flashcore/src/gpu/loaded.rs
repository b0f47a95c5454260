//! Kernels loaded on the device. No kernel is ever unloaded: a captured graph may refer to it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Context, DriverError, Expect, Function, Printed};
use ptx::{Dim3, Kernel};

use super::scratch::Scratch;
use crate::AttentionError;

/// The key of loading and admission. Problems of different lengths often give the same text and differ
/// only in the launch arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    text: String,
    entry: String,
    expect: Expect,
    cluster: Dim3,
}

/// The loaded kernels of a device, and the kernels whose loading failed for good.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    all: Mutex<HashMap<Key, Result<Arc<Function>, DriverError>>>,
    pub scratch: Scratch,
}

impl Kernels {
    /// The loaded kernel, which passed admission; loads it on the first call.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        kernel: &Kernel,
        expect: &Expect,
    ) -> Result<Arc<Function>, AttentionError> {
        let printed = Printed::new(kernel);
        let (text, entry) = (printed.text().to_owned(), kernel.entry.clone());
        let key = Key { text, entry, expect: *expect, cluster: kernel.launch.cluster };
        let known = self.all.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(known) = known {
            return Ok(known?);
        }
        let made = Function::load_printed(context, &printed, expect).map(Arc::new);
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
