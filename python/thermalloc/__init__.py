"""thermalloc: an allocator that keeps hot memory warm and gives cold memory back."""
