//! The library that `LD_PRELOAD` loads into another program. It wraps functions of the CUDA driver, and
//! writes records of launches. It must never change what the program computes: every failure of its own ends
//! in a record's `refused`, and the program's call goes on.
//!
//! A program finds the driver's functions in three ways, and each leads here: by linking (this library comes
//! first in the order of symbols), by `dlsym` ([`symbols`]), and by `cuGetProcAddress` ([`hooks`]).
//!
//! The library has no dependencies, since a file of it alone is compiled (`build.rs`).
#![allow(unsafe_code, reason = "the interface of the CUDA driver and of the dynamic linker")]
#![cfg_attr(test, allow(dead_code, reason = "a test binary wraps no functions"))]

mod copy;
mod driver;
mod hooks;
mod image;
mod launch;
mod params;
#[path = "../protocol.rs"]
mod protocol;
mod selection;
mod state;
#[cfg(not(test))]
mod symbols;
