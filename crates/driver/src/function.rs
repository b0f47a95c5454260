//! Functions: entries of loaded modules that passed admission and can be launched.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ptx::{Kernel, Launch, Op, Statement};

use crate::call::{AddressParam, ParamBlock};
use crate::context::Relaxed;
use crate::memory::Kept;
use crate::module::Module;
use crate::tensor_map::LaunchMaps;
use crate::{Call, Context, DeviceSlice, DriverError, StreamRef, sys};

/// Maximum shared memory in bytes without a function attribute that requests more.
const DEFAULT_SHARED: u32 = 48 * 1024;
/// Larger clusters are not portable, and the function must request them by an attribute.
const PORTABLE_CLUSTER: u64 = 8;
/// Maximum number of parameters of a launch. They are on the stack.
const MAX_PARAMS: usize = 64;

/// Resources of a compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: spills and per-thread arrays.
    pub local: u32,
    /// Static shared memory per CTA in bytes.
    pub shared: u32,
    /// Maximum number of threads of a CTA.
    pub max_threads: u32,
}

/// The resources that a plan promises for its kernel, compared with the compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Expect {
    /// Maximum registers per thread.
    pub max_registers: u32,
    /// Maximum local memory per thread in bytes; `None` means no limit.
    pub local_bytes: Option<u32>,
    /// Maximum dynamic shared memory of a launch in bytes.
    pub dynamic_shared: u32,
    /// Maximum threads of a CTA.
    pub threads: u32,
}

impl Expect {
    /// Only the limits that the launch itself needs.
    pub fn of(launch: &Launch) -> Expect {
        Expect {
            max_registers: 255,
            local_bytes: None,
            dynamic_shared: launch.dynamic_shared,
            threads: u32::try_from(launch.block.count()).unwrap_or(u32::MAX),
        }
    }

    /// Compares the compiled kernel's resources with the expected ones. `shared_per_cta` is the device's
    /// limit.
    fn admit(&self, entry: &str, found: &Resources, shared_per_cta: u32) -> Result<(), DriverError> {
        let shared = u64::from(found.shared) + u64::from(self.dynamic_shared);
        let cases = [
            ("registers per thread", u64::from(found.registers), u64::from(self.max_registers)),
            ("local bytes per thread", found.local.into(), self.local_bytes.map_or(u64::MAX, u64::from)),
            ("threads per CTA", self.threads.into(), found.max_threads.into()),
            ("shared bytes per CTA", shared, shared_per_cta.into()),
        ];
        match cases.into_iter().find(|&(_, found, accepted)| found > accepted) {
            None => Ok(()),
            Some((what, found, accepted)) => {
                Err(DriverError::Admission { entry: entry.to_owned(), what, found, accepted })
            }
        }
    }
}

/// A kernel with the printed text of its module.
#[derive(Debug)]
pub struct Printed<'k> {
    kernel: &'k Kernel,
    text: String,
}

impl<'k> Printed<'k> {
    /// Prints a kernel's module.
    pub fn new(kernel: &'k Kernel) -> Printed<'k> {
        Printed { kernel, text: kernel.module.to_string() }
    }

    /// The module as PTX.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Compiles the module or takes it from the cache, and loads it.
    fn load(&self, context: &Arc<Context>) -> Result<Arc<Module>, DriverError> {
        let Printed { kernel, text } = self;
        param_bytes(kernel)?;
        runs_on(kernel, context)?;
        let target = kernel.module.target;
        Ok(Arc::new(match is_one_program(&kernel.module) {
            true => Module::load_whole(context, text, target)?,
            false => Module::load(context, text, target)?,
        }))
    }
}

/// An entry of a loaded module that passed admission. It keeps its module loaded. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Function(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    module: Arc<Module>,
    raw: sys::CUfunction,
    entry: String,
    /// Size in bytes of each parameter.
    params: Vec<u32>,
    resources: Resources,
    /// Maximum dynamic shared memory that launches may use now.
    dynamic_shared: AtomicU32,
}

// SAFETY: a handle of a loaded module; the driver's functions on it may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Function {
    /// Compiles the kernel or takes it from the cache, loads it completely, and compares its resources with
    /// `expect`. Nothing is left to load at the first launch, which may be under capture.
    ///
    /// # Errors
    /// [`DriverError::Compile`] with the compiler's log; [`DriverError::Admission`] with the found and the
    /// accepted value.
    pub fn load(context: &Arc<Context>, kernel: &Kernel, expect: &Expect) -> Result<Function, DriverError> {
        Function::load_printed(context, &Printed::new(kernel), expect)
    }

    /// Like [`Function::load`], for a kernel whose module is already printed.
    ///
    /// # Errors
    /// As [`Function::load`].
    pub fn load_printed(
        context: &Arc<Context>,
        printed: &Printed<'_>,
        expect: &Expect,
    ) -> Result<Function, DriverError> {
        let module = printed.load(context)?;
        Function::of_module(context, &module, printed.kernel, expect)
    }

    /// Like [`Function::load`], for several entries of one module, which is compiled and loaded once. The
    /// kernels must have the same module.
    ///
    /// # Errors
    /// As [`Function::load`].
    pub fn load_all<'k>(
        context: &Arc<Context>,
        kernels: impl IntoIterator<Item = (&'k Kernel, &'k Expect)>,
    ) -> Result<Vec<Function>, DriverError> {
        let mut kernels = kernels.into_iter().peekable();
        let Some((first, _)) = kernels.peek() else { return Ok(Vec::new()) };
        let module = Printed::new(first).load(context)?;
        kernels.map(|(kernel, expect)| Function::of_module(context, &module, kernel, expect)).collect()
    }

    fn of_module(
        context: &Arc<Context>,
        module: &Arc<Module>,
        kernel: &Kernel,
        expect: &Expect,
    ) -> Result<Function, DriverError> {
        let params = param_bytes(kernel)?;
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let raw = module.function(&kernel.entry)?;
        // SAFETY: the function belongs to a loaded module.
        if let Some(result) = unsafe { sys::cuFuncLoad(raw) } {
            context.check("cuFuncLoad", result)?;
        }
        // If the driver has no cuFuncLoad, reading the attributes loads the function (CUDA C++ Programming
        // Guide, "Lazy Loading").
        let resources = resources(context, raw)?;
        expect.admit(&kernel.entry, &resources, context.info().shared_per_cta)?;
        let function = Function(Arc::new(Inner {
            module: module.clone(),
            raw,
            entry: kernel.entry.clone(),
            params,
            resources,
            dynamic_shared: AtomicU32::new(DEFAULT_SHARED.saturating_sub(resources.shared)),
        }));
        function.allow_shared(expect.dynamic_shared)?;
        if kernel.launch.cluster.count() > PORTABLE_CLUSTER {
            function.set(sys::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        Ok(function)
    }

    /// The resources of the compiled kernel.
    pub fn resources(&self) -> Resources {
        self.0.resources
    }

    /// The name of the entry.
    pub fn entry(&self) -> &str {
        &self.0.entry
    }

    /// Resident CTAs per SM for this launch. Clusters are not taken into account.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn resident_ctas(&self, launch: &Launch) -> Result<u32, DriverError> {
        let (context, mut ctas) = (self.0.module.context(), 0);
        let threads = i32::try_from(launch.block.count()).unwrap_or(i32::MAX);
        let _entered = context.enter()?;
        // SAFETY: the function belongs to a loaded module; the pointer is to a live i32.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut ctas,
                self.0.raw,
                threads,
                launch.dynamic_shared as usize,
            )
        };
        context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(ctas as u32)
    }

    /// Enqueues a launch on the stream. The call does not wait or allocate device memory, and may be
    /// captured. `slices` are the buffers that the arguments and tensor maps refer to. Tensor maps are passed
    /// by value, so a graph keeps the maps of its capture.
    ///
    /// The arguments are checked against the entry's parameters, not against what the kernel does with them:
    /// see the crate's documentation on kernels as programs.
    ///
    /// # Errors
    /// [`DriverError::Contract`] when the arguments do not match the parameters of the entry, or when the
    /// launch exceeds the resources that were stated; [`DriverError::TensorMap`] when the hardware does not
    /// support a map of these slices.
    pub fn launch<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        call: &Call,
        slices: &[DeviceSlice<'_>],
    ) -> Result<(), DriverError> {
        let (context, stream) = (self.0.module.context(), stream.into());
        context.same("the stream", stream.context())?;
        let (launch, params) = (call.launch(), call.params());
        let count = params.bits.len();
        if count > MAX_PARAMS {
            return Err(self.refuse(format!(
                "invalid value '{count}' for the number of parameters: expected at most {MAX_PARAMS}"
            )));
        }
        // Neither is filled beyond the parameters: that would take as long as the rest of the call.
        let mut block = [const { MaybeUninit::<u64>::uninit() }; MAX_PARAMS];
        let mut pointers = [const { MaybeUninit::<*mut c_void>::uninit() }; MAX_PARAMS];
        block[..count].write_copy_of_slice(&params.bits);
        for &AddressParam { param, buffer, offset } in &params.addresses {
            let slice = slices.get(buffer).ok_or_else(|| self.no_buffer(buffer, slices.len()))?;
            if offset > slice.bytes() as u64 {
                let bytes = slice.bytes();
                let reason = format!("an argument begins {offset} bytes into buffer {buffer} of {bytes}");
                return Err(self.refuse(reason));
            }
            block[param].write(slice.address() + offset);
        }
        for (pointer, bits) in pointers[..count].iter_mut().zip(&mut block) {
            pointer.write(bits.as_mut_ptr().cast());
        }
        let mut maps = LaunchMaps::new();
        call.maps().for_slices(context, slices, &mut maps, |buffer| self.no_buffer(buffer, slices.len()))?;
        for &(param, index) in &params.maps {
            let map = maps.get(index).ok_or_else(|| {
                self.refuse(format!("an argument names tensor map {index} of {}", maps.len()))
            })?;
            pointers[param].write(std::ptr::from_ref(map).cast_mut().cast());
        }
        self.check(launch, params)?;
        let config = sys::CUlaunchConfig {
            grid: [launch.grid.0, launch.grid.1, launch.grid.2],
            block: [launch.block.0, launch.block.1, launch.block.2],
            shared_bytes: launch.dynamic_shared,
            stream: stream.handle(),
            // The driver reads them.
            attributes: params.attributes.as_ptr().cast_mut(),
            count: params.attributes.len() as u32,
        };
        let kept = || {
            let module: Kept = self.0.module.clone();
            std::iter::once(module).chain(slices.iter().filter_map(|slice| slice.owner())).collect()
        };
        let _steady = stream.steady_keeping(kept)?;
        context.call_within("cuLaunchKernelEx", || {
            // SAFETY: `pointers` has one entry per parameter, each to as many live bytes as the parameter has
            // (`check` compared the sizes with the parameters of the module that was printed and loaded). The
            // driver copies the bytes before it returns. The function's module is alive, and a graph keeps
            // it. The crate's documentation says what the caller promises of the kernel itself.
            unsafe {
                let pointers = pointers.as_mut_ptr().cast();
                sys::cuLaunchKernelEx(&config, self.0.raw, pointers, std::ptr::null_mut())
            }
        })
    }

    fn check(&self, launch: &Launch, params: &ParamBlock) -> Result<(), DriverError> {
        if params.has_struct {
            return Err(
                self.refuse("an argument is a struct by value, which a call does not pass".to_owned())
            );
        }
        if params.sizes != self.0.params {
            let given = &params.sizes;
            return Err(
                self.refuse(format!("its parameters take {:?} bytes, given are {given:?}", self.0.params))
            );
        }
        let allowed = self.0.dynamic_shared.load(Ordering::Relaxed);
        if launch.dynamic_shared > allowed {
            let wanted = launch.dynamic_shared;
            return Err(self
                .refuse(format!("{wanted} bytes of dynamic shared memory; at most {allowed} were stated")));
        }
        let threads = launch.block.count();
        if threads > self.0.resources.max_threads.into() {
            let most = self.0.resources.max_threads;
            return Err(self
                .refuse(format!("invalid value '{threads}' for threads per CTA: expected at most {most}")));
        }
        let hopper = self.0.module.context().info().capability.0 >= 9;
        if !hopper && (launch.overlapping || launch.cluster.count() > 1) {
            return Err(self.refuse("clusters and overlapping launches need sm_90 or later".to_owned()));
        }
        Ok(())
    }

    /// Raises the dynamic shared memory that launches may use to at least `bytes`.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), DriverError> {
        if bytes > self.0.dynamic_shared.load(Ordering::Relaxed) {
            self.set(sys::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)?;
            self.0.dynamic_shared.fetch_max(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    fn set(&self, which: u32, value: i32) -> Result<(), DriverError> {
        let context = self.0.module.context();
        let _entered = context.enter()?;
        // SAFETY: the function belongs to a loaded module.
        context.check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.0.raw, which, value) })
    }

    fn refuse(&self, reason: String) -> DriverError {
        DriverError::Contract { entry: self.0.entry.clone(), reason }
    }

    fn no_buffer(&self, index: usize, count: usize) -> DriverError {
        self.refuse(format!("an argument or a tensor map names buffer {index} of {count}"))
    }
}

/// An error unless the device runs code for the module's target.
fn runs_on(kernel: &Kernel, context: &Context) -> Result<(), DriverError> {
    let (target, sm) = (kernel.module.target, context.info().sm());
    if target.runs_on(sm) {
        return Ok(());
    }
    Err(DriverError::Contract {
        entry: kernel.entry.clone(),
        reason: format!("its code is for {target}; {} is sm_{sm}", context.info().name),
    })
}

/// Whether the linker would generate worse code for the module than loading the text as one program. For the
/// linker, ptxas compiles relocatable code: it joins no loads from shared arrays of known size, and it limits
/// a function that raises its registers (`setmaxnreg`) to the initial number, so that it spills.
fn is_one_program(module: &ptx::Module) -> bool {
    let bodies = || module.functions().filter_map(|f| f.body.as_ref());
    let inner = bodies().flat_map(|body| &body.variables);
    let arrays = module.variables().chain(inner).any(|v| v.space == ptx::Space::Shared && v.bytes() > 0);
    let raises = |s: &Statement| matches!(s, Statement::Inst(i) if matches!(i.op, Op::Setmaxnreg(_)));
    arrays || bodies().flat_map(|body| &body.statements).any(raises)
}

/// Size in bytes of each parameter of the entry.
fn param_bytes(kernel: &Kernel) -> Result<Vec<u32>, DriverError> {
    let entry = kernel.module.function(&kernel.entry).ok_or_else(|| DriverError::Contract {
        entry: kernel.entry.clone(),
        reason: "the module has no entry of that name".to_owned(),
    })?;
    Ok(entry.params.iter().map(ptx::Param::bytes).collect())
}

fn resources(context: &Context, function: sys::CUfunction) -> Result<Resources, DriverError> {
    let read = |which| {
        let mut value = 0;
        // SAFETY: the function belongs to a loaded module; the pointer is to a live i32.
        let result = unsafe { sys::cuFuncGetAttribute(&mut value, which, function) };
        context.check("cuFuncGetAttribute", result).map(|()| value as u32)
    };
    Ok(Resources {
        registers: read(sys::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        local: read(sys::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        shared: read(sys::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        max_threads: read(sys::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
    })
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;

    #[test]
    fn programs_that_the_linker_would_spoil_are_told() {
        let built = |array: fn(&mut ptx::Builder)| {
            let mut k = ptx::Builder::kernel("k");
            array(&mut k);
            is_one_program(&k.into_module(Target::sm(80)))
        };
        assert!(!built(|_| ()));
        assert!(!built(|k| {
            k.dynamic_shared(16);
        }));
        assert!(built(|k| {
            k.shared_array("cells", 4, 8);
        }));
        assert!(built(|k| k.setmaxnreg_inc(240)));
    }

    #[test]
    fn admission_names_what_was_found_and_what_is_accepted() {
        let found = Resources { registers: 168, local: 16, shared: 1024, max_threads: 128 };
        let expect = Expect { max_registers: 168, local_bytes: Some(16), dynamic_shared: 2048, threads: 128 };
        let admit = |expect: Expect| expect.admit("e", &found, 3072).map_err(|e| e.to_string());
        assert_eq!(admit(expect), Ok(()));
        for (expect, words) in [
            (
                Expect { max_registers: 167, ..expect },
                "invalid value '168' for registers per thread: expected at most 167",
            ),
            (
                Expect { local_bytes: Some(0), ..expect },
                "invalid value '16' for local bytes per thread: expected at most 0",
            ),
            (
                Expect { threads: 129, ..expect },
                "invalid value '129' for threads per CTA: expected at most 128",
            ),
            (
                Expect { dynamic_shared: 2049, ..expect },
                "invalid value '3073' for shared bytes per CTA: expected at most 3072",
            ),
        ] {
            let error = admit(expect).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(admit(Expect { local_bytes: None, ..expect }), Ok(()));
    }
}
