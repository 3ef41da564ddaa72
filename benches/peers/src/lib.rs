//! Empty: this package exists for its dependencies, whose static libraries `build.sh` links.
