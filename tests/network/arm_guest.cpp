/// Runs functions of a library under an emulator, on the memory of the process that started it: a page that they touch
/// is fetched from there, to the same address, and sent back after the call.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

namespace
{

constexpr uint64_t kPage = 4096;

uint64_t pages[1 << 18]; // that this call has, in the order of their fetches
int64_t num_pages = 0;
std::atomic_flag is_fetching;

void send(void const* from, size_t size)
{
    for (ssize_t done = 0; size > 0; size -= done, from = static_cast<char const*>(from) + done)
    {
        if ((done = write(STDOUT_FILENO, from, size)) <= 0)
        {
            _exit(1);
        }
    }
}

void receive(void* to, size_t size)
{
    for (ssize_t done = 0; size > 0; size -= done, to = static_cast<char*>(to) + done)
    {
        if ((done = read(STDIN_FILENO, to, size)) <= 0)
        {
            _exit(0);
        }
    }
}

void fetch(int, siginfo_t* fault, void*)
{
    while (is_fetching.test_and_set())
    {
    }
    uint64_t const address = reinterpret_cast<uint64_t>(fault->si_addr) / kPage * kPage;
    if (std::find(pages, pages + num_pages, address) == pages + num_pages) // else another thread has fetched it
    {
        void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        send(&address, sizeof(address));
        receive(page, kPage);
        if (mremap(page, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED)
        {
            _exit(2);
        }
        pages[num_pages++] = address;
    }
    is_fetching.clear();
}

struct Call
{
    uint64_t (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
    uint64_t arguments[6];
};

} // namespace

int main(int, char** arguments)
{
    void* const library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr)
    {
        std::fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    struct sigaction action = {};
    action.sa_sigaction = fetch;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    uint64_t const first[]{reinterpret_cast<uint64_t>(dlsym), reinterpret_cast<uint64_t>(library)};
    send(first, sizeof(first));
    for (;;)
    {
        Call call;
        receive(&call, sizeof(call));
        uint64_t const* const a = call.arguments;
        uint64_t const end[]{0, call.function(a[0], a[1], a[2], a[3], a[4], a[5])};
        send(end, sizeof(end));
        for (int64_t i = 0; i < num_pages; ++i)
        {
            void* const page = reinterpret_cast<void*>(pages[i]);
            send(page, kPage);
            munmap(page, kPage);
        }
        num_pages = 0;
    }
}
