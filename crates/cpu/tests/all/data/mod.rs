//! Operands that a test owns.

use flashcore_cpu::Input;
use problem::{E4m3, E5m2, Elements, OperandMap, Operands};

macro_rules! data {
    ($($name:ident: $element:ty),* $(,)?) => {
        /// The elements of an operand.
        #[derive(Clone)]
        pub enum Data {
            $($name(Vec<$element>)),*
        }

        impl Data {
            pub fn elements(&self) -> Elements<'_> {
                match self {
                    $(Data::$name(elements) => elements.into()),*
                }
            }
        }

        $(impl From<Vec<$element>> for Data {
            fn from(elements: Vec<$element>) -> Data {
                Data::$name(elements)
            }
        })*
    };
}
data! { F32: f32, F16: half::f16, Bf16: half::bf16, I32: i32, U8: u8, E4m3: E4m3, E5m2: E5m2 }

/// The operands as slices.
pub fn slices(data: &OperandMap<Data>) -> Operands<'_> {
    data.map(|_, data| data.elements())
}

/// The operands as inputs of a kernel.
pub fn inputs<'a>(operands: &Operands<'a>) -> OperandMap<Input<'a>> {
    operands.map(|_, &elements| elements.into())
}
