//! A result as text for people and as JSON for programs, both in fio's layout.

pub(crate) mod json;

pub(crate) mod text;
