//! A program that launches kernels by the CUDA driver, to be captured. Its first argument says how it finds
//! the driver's functions (`linked`, `dlsym`, `proc`), its second one what it does.
#![allow(non_snake_case)]

use std::ffi::{CString, c_char, c_void};

type Address = usize;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: i32) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

#[cfg(linked)]
mod linked {
    unsafe extern "C" {
        pub fn cuInit();
        pub fn cuDevicePrimaryCtxRetain();
        pub fn cuCtxSetCurrent();
        pub fn cuMemAlloc_v2();
        pub fn cuMemcpyHtoD_v2();
        pub fn cuModuleLoadData();
        pub fn cuModuleGetFunction();
        pub fn cuLaunchKernel();
    }

    pub fn find(name: &str) -> usize {
        match name {
            "cuInit" => cuInit as *const () as usize,
            "cuDevicePrimaryCtxRetain" => cuDevicePrimaryCtxRetain as *const () as usize,
            "cuCtxSetCurrent" => cuCtxSetCurrent as *const () as usize,
            "cuMemAlloc_v2" => cuMemAlloc_v2 as *const () as usize,
            "cuMemcpyHtoD_v2" => cuMemcpyHtoD_v2 as *const () as usize,
            "cuModuleLoadData" => cuModuleLoadData as *const () as usize,
            "cuModuleGetFunction" => cuModuleGetFunction as *const () as usize,
            "cuLaunchKernel" => cuLaunchKernel as *const () as usize,
            _ => panic!("{name} is not linked"),
        }
    }
}

/// The address of a function of the driver.
fn find(name: &str) -> usize {
    let way = std::env::args().nth(1).unwrap();
    #[cfg(linked)]
    if way == "linked" {
        return linked::find(name);
    }
    let symbol = CString::new(name).unwrap();
    unsafe {
        let driver = dlopen(c"libcuda.so.1".as_ptr(), 1);
        assert!(!driver.is_null());
        if way == "proc" {
            type Get = unsafe extern "C" fn(*const c_char, *mut usize, i32, u64, *mut u32) -> u32;
            let get: Get = std::mem::transmute(dlsym(driver, c"cuGetProcAddress_v2".as_ptr()));
            let (mut found, mut status) = (0, 0);
            assert_eq!(get(symbol.as_ptr(), &mut found, 12040, 0, &mut status), 0, "{name}");
            return found;
        }
        dlsym(driver, symbol.as_ptr()) as usize
    }
}

macro_rules! call {
    ($name:ident($($arg:expr => $type:ty),*)) => {{
        let function = find(stringify!($name));
        assert!(function != 0, stringify!($name));
        let status = unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn($($type),*) -> u32>(function)($($arg),*)
        };
        assert_eq!(status, 0, stringify!($name));
    }};
}

/// Memory of the device with these bytes.
fn memory(bytes: &[u8]) -> u64 {
    let mut address = 0u64;
    call!(cuMemAlloc_v2(&mut address => &mut u64, bytes.len() => usize));
    call!(cuMemcpyHtoD_v2(address => u64, bytes.as_ptr() => *const u8, bytes.len() => usize));
    address
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn module(image: *const u8) -> Address {
    let mut module = 0;
    call!(cuModuleLoadData(&mut module => &mut Address, image => *const u8));
    module
}

fn function(module: Address, name: &str) -> Address {
    let (mut function, name) = (0, CString::new(name).unwrap());
    call!(cuModuleGetFunction(&mut function => &mut Address, module => Address, name.as_ptr() => *const c_char));
    function
}

/// Launches one CTA of 32 threads. Every parameter has its bytes.
fn launch(function: Address, stream: Address, params: &[Vec<u8>]) {
    let pointers: Vec<*const u8> = params.iter().map(|param| param.as_ptr()).collect();
    call!(cuLaunchKernel(
        function => Address, 1 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32,
        stream => Address, pointers.as_ptr() => *const *const u8, std::ptr::null() => *const c_void
    ));
}

/// The parameters of `sum`: an address inside memory, a struct with a table of addresses, and a number.
fn sum_params(x: u64, table: u64, factor: f32) -> Vec<Vec<u8>> {
    vec![words(&[x + 4]), words(&[32, table]), words(&[u64::from(factor.to_bits())])]
}

fn main() {
    let text = CString::new(std::fs::read("kernels.ptx").unwrap()).unwrap();
    call!(cuInit(0 => u32));
    let mut context = 0;
    call!(cuDevicePrimaryCtxRetain(&mut context => &mut Address, 0 => i32));
    call!(cuCtxSetCurrent(context => Address));
    let x = memory(&(0..64).flat_map(|i| (i as f32).to_le_bytes()).collect::<Vec<_>>());
    let y = memory(&[0; 128]);
    let table = memory(&words(&[7, y + 8]));
    match std::env::args().nth(2).unwrap().as_str() {
        "sums" => {
            let sum = function(module(text.as_ptr().cast()), "sum");
            (1..=3).for_each(|factor| launch(sum, 0, &sum_params(x, table, factor as f32)));
        }
        "store" => {
            let store = function(module(text.as_ptr().cast()), "store");
            launch(store, 0, &[words(&[x]), words(&[1])]);
        }
        "library" => {
            let (mut library, mut kernel) = (0usize, 0usize);
            let null = std::ptr::null();
            call!(cuLibraryLoadData(
                &mut library => &mut Address, text.as_ptr().cast() => *const u8, null => *const u8,
                null => *const u8, 0 => u32, null => *const u8, null => *const u8, 0 => u32
            ));
            call!(cuLibraryGetKernel(&mut kernel => &mut Address, library => Address, c"sum".as_ptr() => *const c_char));
            launch(kernel, 0, &sum_params(x, table, 2.0));
        }
        "map" => {
            let map = function(module(text.as_ptr().cast()), "first");
            let (mut bytes, dims, strides, extents) = ([0u64; 16], [8u64, 8], [32u64], [8u32, 8]);
            call!(cuTensorMapEncodeTiled(
                &mut bytes => &mut [u64; 16], 7 => u32, 2 => u32, x => u64, dims.as_ptr() => *const u64,
                strides.as_ptr() => *const u64, extents.as_ptr() => *const u32, [1u32, 1].as_ptr() => *const u32,
                0 => u32, 0 => u32, 0 => u32, 0 => u32
            ));
            launch(map, 0, &[words(&bytes), words(&[y])]);
        }
        "graph" => {
            let sum = function(module(text.as_ptr().cast()), "sum");
            let (mut stream, mut graph) = (0, 0);
            call!(cuStreamCreate(&mut stream => &mut Address, 0 => u32));
            call!(cuStreamBeginCapture_v2(stream => Address, 0 => u32));
            launch(sum, stream, &sum_params(x, table, 2.0));
            call!(cuStreamEndCapture(stream => Address, &mut graph => &mut Address));
        }
        "image" => {
            // A cubin or a fat binary, by the descriptor of the CUDA runtime.
            let image = std::fs::read("image").unwrap();
            let descriptor = [0x4662_43b1 | 1 << 32, image.as_ptr() as u64, 0, 0];
            let is_cubin = image.starts_with(b"\x7fELF");
            let at = if is_cubin { image.as_ptr() } else { descriptor.as_ptr().cast() };
            launch(function(module(at), "twice"), 0, &[words(&[x])]);
        }
        "select" => {
            // Some programs choose the launches that are recorded themselves.
            let sum = function(module(text.as_ptr().cast()), "sum");
            let (begin, end) = unsafe {
                let symbol = |name: &std::ffi::CStr| dlsym(std::ptr::null_mut(), name.as_ptr()) as usize;
                (symbol(c"flashcore_capture_begin"), symbol(c"flashcore_capture_end"))
            };
            assert!(begin != 0 && end != 0);
            launch(sum, 0, &sum_params(x, table, 1.0));
            let begun = unsafe {
                type Begin = unsafe extern "C" fn(*const c_char, *const c_char, i32) -> i32;
                std::mem::transmute::<usize, Begin>(begin)(c"sum".as_ptr(), c"2".as_ptr(), 0)
            };
            assert_eq!(begun, 0);
            (2..=3).for_each(|factor| launch(sum, 0, &sum_params(x, table, factor as f32)));
            unsafe { std::mem::transmute::<usize, unsafe extern "C" fn()>(end)() };
            (4..=6).for_each(|factor| launch(sum, 0, &sum_params(x, table, factor as f32)));
        }
        other => panic!("{other}"),
    }
}
